"""Cells that name themselves, through stream_out, messages, inboxes and stream_in, between unequal pipelines."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dejavu.ids import Epoch, RowId
from dejavu.kv.chunk import decode_message
from dejavu.kv.inbox import KvInbox
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.pool import TORCH_DTYPES, KvPool
from dejavu.kv.primitives import StreamSetup, stream_in, stream_out
from dejavu.kv.route import Holding, RowSpan
from dejavu.kv.staging import StagingRing

EPOCH = Epoch(1)


class Post:
    """Keeps messages for each owner, copied, as a network would."""

    def __init__(self) -> None:
        self.letters: list[tuple[str, bytes, bytearray]] = []

    def send(self, owner: str, header: bytes, payload: Sequence[memoryview]) -> Future[None]:
        self.letters.append((owner, header, bytearray(b"".join(payload))))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def encoded_cells(layer: int, kind: int, rows: Sequence[int], layout: KvLayout, length: int) -> torch.Tensor:
    """[B, H, T, D], each element a number of its own, exact in float32."""
    row = torch.tensor(rows)[:, None, None, None]
    head = torch.arange(layout.num_kv_heads)[None, :, None, None]
    position = torch.arange(length)[None, None, :, None]
    dim = torch.arange(layout.head_dim)[None, None, None, :]
    number = (row * layout.num_layers + layer) * 2 + kind
    number = ((number * layout.num_kv_heads + head) * layout.max_length + position) * layout.head_dim + dim
    if layout.dtype != "float32":
        number = number % 251
    return number.to(TORCH_DTYPES[layout.dtype])


def split(total: int, parts: int, seed: int) -> list[tuple[int, int]]:
    edges = [0, *sorted(random.Random(seed).sample(range(1, total), parts - 1)), total]
    return list(itertools.pairwise(edges))


def holdings(layout: KvLayout, depth: int, head_parts: int, seed: int, name: str) -> list[Holding]:
    return [
        Holding(owner=f"{name}{stage}.{part}", layers=LayerRange(*layers), heads=heads)
        for stage, layers in enumerate(split(layout.num_layers, depth, seed))
        for part, heads in enumerate(split(layout.num_kv_heads, head_parts, seed + 1))
    ]


def hand_off(
    layout: KvLayout,
    sources: Sequence[Holding],
    targets: Sequence[Holding],
    lengths: Sequence[int],
    *,
    buffer_bytes: int,
    seed: int,
) -> dict[str, KvPool]:
    """Every target's pool, NaN before, after all rows have been streamed; row i lies in pool row i."""
    rows = [RowSpan(row_id=RowId(50 + index), length=length) for index, length in enumerate(lengths)]
    post, staging = Post(), StagingRing(2, buffer_bytes)
    for source in sources:
        setup = StreamSetup(cluster="c", epoch=EPOCH, source=source, targets=tuple(targets), layout=layout)
        for layer in source.layers.indices:
            keys, values = (
                encoded_cells(layer, kind, range(len(rows)), layout, max(lengths))
                .transpose(1, 2)
                .contiguous()
                .transpose(1, 2)
                for kind in (0, 1)
            )
            heads = slice(*source.heads)
            stream_out(layer, keys[:, heads], values[:, heads], rows, setup, staging, post, timeout_s=5)
    assert staging.num_out == 0
    inboxes = {one.owner: KvInbox(cluster="c", epoch=EPOCH, layout=layout, holding=one) for one in targets}
    for inbox in inboxes.values():
        for span in rows:
            inbox.expect(span.row_id, span.length)
    random.Random(seed).shuffle(post.letters)
    for owner, header, payload in post.letters:
        answer = inboxes[owner].accept(decode_message(header), memoryview(payload))
        assert (answer.dropped, answer.corrupt) == (0, ())
    pools = {}
    for target in targets:
        pool = KvPool(layout, target.layers, len(rows), heads=target.heads)
        pool.cells_LCRHSD.fill_(float("nan"))
        for index, span in enumerate(rows):
            landed = inboxes[target.owner].take(span.row_id)
            stream_in(landed, pool, index)
            inboxes[target.owner].recycle(landed)
        pools[target.owner] = pool
    return pools


def check(layout: KvLayout, targets: Sequence[Holding], lengths: Sequence[int], pools: dict[str, KvPool]) -> None:
    for target in targets:
        pool, heads = pools[target.owner], slice(*target.heads)
        for layer in target.layers.indices:
            for kind, buffer in enumerate((pool.keys(layer), pool.values(layer))):
                for index, length in enumerate(lengths):
                    wanted = encoded_cells(layer, kind, [index], layout, length)[0, heads]
                    assert torch.equal(buffer[index, :, :length], wanted), (target.owner, layer, kind, index)
                    assert buffer[index, :, length:].isnan().all()


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("source_depth", "target_depth"), [(1, 1), (1, 3), (2, 3), (3, 2), (4, 1), (4, 3)])
def test_cells_arrive_where_they_belong_between_unequal_depths(
    num_kv_heads: int, source_depth: int, target_depth: int
) -> None:
    layout = KvLayout(
        model_hash="m", num_layers=7, num_kv_heads=num_kv_heads, head_dim=3, dtype="float32", max_length=20
    )
    lengths = [1, 2, 15, 16, 17, 20]
    sources = holdings(layout, source_depth, 1, 1, "p")
    targets = holdings(layout, target_depth, 1, 2, "t")
    pools = hand_off(layout, sources, targets, lengths, buffer_bytes=4096, seed=3)
    check(layout, targets, lengths, pools)


@settings(max_examples=40)
@given(st.data())
def test_cells_arrive_whatever_the_cuts_dims_dtypes_and_staging(data: st.DataObject) -> None:
    layout = KvLayout(
        model_hash="m",
        num_layers=data.draw(st.sampled_from([5, 6, 7])),
        num_kv_heads=data.draw(st.sampled_from([1, 2, 4])),
        head_dim=data.draw(st.sampled_from([1, 3, 5, 8])),
        dtype=data.draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        max_length=12,
    )
    seed = data.draw(st.integers(0, 999))
    sides = [
        holdings(
            layout,
            data.draw(st.integers(1, 4)),
            data.draw(st.integers(1, layout.num_kv_heads)),
            seed + index,
            name,
        )
        for index, name in enumerate(("p", "t"))
    ]
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    position_bytes = layout.position_bytes
    buffer_bytes = data.draw(st.integers(position_bytes, 8 * position_bytes))
    pools = hand_off(layout, sides[0], sides[1], lengths, buffer_bytes=buffer_bytes, seed=seed)
    check(layout, sides[1], lengths, pools)
