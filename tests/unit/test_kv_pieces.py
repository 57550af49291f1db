"""A region as the contiguous pieces of memory in which it lies: what the naive level sends one by one."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from dejavu.ids import Epoch, RowId
from dejavu.kv.box import BOTH
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.primitives import Region, gather, pool_region, scatter
from dejavu.kv.staging import StagingRing

LAYOUT = KvLayout(model_hash="m", num_layers=5, num_kv_heads=3, head_dim=2, dtype="float32", max_length=8)
LAYERS = LayerRange(1, 4)
A = RowId(1)


def cells(*shape: int) -> Tensor:
    """Every element a number of its own, never 0."""
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def region(parts: Iterable[Tensor], layers: LayerRange, kinds: tuple[int, int] = BOTH) -> Region:
    """Heads [1, 3), positions [2, 6)."""
    return Region(row_id=A, layers=layers, heads=(1, 3), positions=(2, 6), parts=tuple(parts), kinds=kinds)


def rebuilt(pieces: Iterable[Region], layers: LayerRange, num_heads: int, num_positions: int) -> Tensor:
    """[L, C, H, T, D] at a receiver that got each piece in a message of its own; heads from 1, positions from 2."""
    staging, found = StagingRing(1, 4096), torch.zeros(len(layers), 2, num_heads, num_positions, LAYOUT.head_dim)
    for piece in pieces:
        (staged,) = scatter([piece], staging, cluster="c", epoch=Epoch(1), dtype="float32", timeout_s=0)
        gather(staged.chunks[0], staged.payload, found, first=(layers.start, 1, 2))
        staged.buffer.release()
    return found


def places(pieces: Iterable[Region]) -> list[tuple[int, int, int, tuple[int, int]]]:
    """Layer, kind, head and positions of each piece, of which it has one each."""
    found = []
    for piece in pieces:
        assert len(piece.layers) == piece.kinds[1] - piece.kinds[0] == piece.heads[1] - piece.heads[0] == 1
        assert len(piece.parts) == 1
        assert piece.parts[0].is_contiguous()
        found.append((piece.layers.start, piece.kinds[0], piece.heads[0], piece.positions))
    return found


def test_a_pools_pieces_are_a_layer_a_kind_and_a_head_each() -> None:
    pool = KvPool(LAYOUT, LAYERS, 2)
    pool.cells_LCRHSD.copy_(cells(*pool.cells_LCRHSD.shape))
    whole = pool_region(pool, 1, A, layers=LayerRange(2, 4), heads=(1, 3), positions=(2, 6))
    pieces = list(whole.pieces())
    assert places(pieces) == [(layer, kind, head, (2, 6)) for layer in (2, 3) for kind in (0, 1) for head in (1, 2)]
    assert sum(piece.nbytes for piece in pieces) == whole.nbytes
    assert all(piece.row_id == A for piece in pieces)
    assert torch.equal(rebuilt(pieces, LayerRange(2, 4), 2, 4), whole.parts[0])


def test_pieces_are_views_and_copy_nothing() -> None:
    pool = KvPool(LAYOUT, LAYERS, 1)
    whole = pool_region(pool, 0, A, layers=LAYERS, heads=(0, 3), positions=(1, 3))
    storage = pool.cells_LCRHSD.untyped_storage().data_ptr()
    assert {piece.parts[0].untyped_storage().data_ptr() for piece in whole.pieces()} == {storage}


def test_one_position_of_a_pool_is_a_piece_for_each_layer_kind_and_head() -> None:
    pool = KvPool(LAYOUT, LAYERS, 2)
    whole = pool_region(pool, 1, A, layers=LAYERS, heads=(0, 3), positions=(5, 6))
    assert len(places(whole.pieces())) == 3 * 2 * 3


def test_tensors_in_which_positions_are_apart_give_a_piece_for_each_position() -> None:
    keys, values = cells(4, 2, 2).transpose(0, 1), -cells(4, 2, 2).transpose(0, 1)
    whole = region((keys[None, None], values[None, None]), LayerRange(2, 3))
    pieces = list(whole.pieces())
    assert places(pieces) == [
        (2, kind, head, (position, position + 1)) for kind in (0, 1) for head in (1, 2) for position in range(2, 6)
    ]
    assert torch.equal(rebuilt(pieces, LayerRange(2, 3), 2, 4)[0], torch.stack((keys, values)))


def test_keys_and_values_of_several_layers_in_tensors_of_their_own_get_their_layers_and_kinds() -> None:
    parts = [cells(1, 1, 2, 4, 2) + 100 * index for index in range(6)]
    pieces = list(region(parts, LAYERS).pieces())
    assert places(pieces) == [(layer, kind, head, (2, 6)) for layer in (1, 2, 3) for kind in (0, 1) for head in (1, 2)]
    assert torch.equal(rebuilt(pieces, LAYERS, 2, 4), torch.cat(parts).view(3, 2, 2, 4, 2))


def test_parts_of_several_layers_each_get_their_layers() -> None:
    parts = [cells(2, 2, 2, 4, 2), cells(1, 2, 2, 4, 2) + 1000]
    pieces = list(region(parts, LAYERS).pieces())
    assert [layer for layer, *_ in places(pieces)] == [1] * 4 + [2] * 4 + [3] * 4
    assert torch.equal(rebuilt(pieces, LAYERS, 2, 4), torch.cat(parts))


@pytest.mark.parametrize("kinds", [(0, 1), (1, 2)], ids=["K", "V"])
def test_a_region_of_one_kind_gives_pieces_of_that_kind(kinds: tuple[int, int]) -> None:
    parts = [cells(1, 1, 2, 4, 2) + 100 * index for index in range(3)]
    pieces = list(region(parts, LAYERS, kinds).pieces())
    assert {kind for _, kind, *_ in places(pieces)} == {kinds[0]}
    found = rebuilt(pieces, LAYERS, 2, 4)
    assert torch.equal(found[:, slice(*kinds)], torch.cat(parts))
    assert not found[:, 1 - kinds[0]].any()


def test_pieces_of_pieces_are_the_same_pieces() -> None:
    pieces = list(region([cells(3, 2, 2, 4, 2)], LAYERS).pieces())
    assert places(again for piece in pieces for again in piece.pieces()) == places(pieces)
