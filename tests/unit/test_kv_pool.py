"""The pool's buffers and the writers that fill them."""

from __future__ import annotations

import pytest
import torch

from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.writers import PromptWriter, StepWriter, StreamingWriter

LAYOUT = KvLayout(model_hash="m", num_layers=6, num_kv_heads=2, head_dim=3, dtype="float32", max_length=8)
LAYERS = LayerRange(2, 5)


def cells(num_rows: int, num_positions: int, *, seed: int = 0) -> torch.Tensor:
    """[B, H, T, D] as a projection makes it: heads are a view into the last dimension."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, num_positions, 2, 3, generator=generator).transpose(1, 2)


def test_a_pool_is_zero_and_as_large_as_planned() -> None:
    pool = KvPool(LAYOUT, LAYERS, 4)
    assert pool.nbytes == KvPool.pool_bytes(LAYOUT, LAYERS, 4) == 3 * 2 * 4 * 2 * 8 * 3 * 4
    assert pool.keys(2).shape == pool.values(4).shape == (4, 2, 8, 3)
    assert pool.keys(2).is_contiguous()
    assert not pool.cells_LCRHSD.any()


def test_layers_are_found_by_global_number_and_others_are_refused() -> None:
    pool = KvPool(LAYOUT, LAYERS, 1)
    pool.keys(3).fill_(3.0)
    assert pool.cells_LCRHSD[1, 0].eq(3.0).all()
    for layer in (0, 1, 5):
        with pytest.raises(IndexError, match=f"layer {layer} is not one of this pool's"):
            pool.keys(layer)


def test_a_pool_beyond_the_models_layers_or_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="go beyond the model's 6"):
        KvPool(LAYOUT, LayerRange(5, 7), 1)
    with pytest.raises(ValueError, match="not within the model's 2"):
        KvPool(LAYOUT, LAYERS, 1, heads=(1, 3))


def test_a_prompt_writes_each_rows_valid_part_into_its_own_row() -> None:
    pool = KvPool(LAYOUT, LAYERS, 4)
    keys, values = cells(2, 5, seed=1), cells(2, 5, seed=2)
    attended = PromptWriter(pool, [3, 0], [5, 2]).update(4, keys, values)
    assert attended[0] is keys
    assert attended[1] is values
    assert torch.equal(pool.keys(4)[3, :, :5], keys[0])
    assert torch.equal(pool.values(4)[0, :, :2], values[1, :, :2])
    assert not pool.keys(4)[0, :, 2:].any()
    assert not pool.keys(4)[1:3].any()
    assert not pool.keys(3).any()


def test_a_prompt_tells_of_each_layer_once_and_only_when_it_is_in_the_pool() -> None:
    pool = KvPool(LAYOUT, LAYERS, 2)
    keys, values = cells(1, 4, seed=1), cells(1, 4, seed=2)
    told: list[int] = []

    def on_layer(layer: int) -> None:
        assert torch.equal(pool.keys(layer)[1, :, :3], keys[0, :, :3])
        assert torch.equal(pool.values(layer)[1, :, :3], values[0, :, :3])
        assert not any(pool.keys(later).any() for later in range(layer + 1, LAYERS.stop))
        told.append(layer)

    writer = PromptWriter(pool, [1], [3], on_layer)
    for layer in LAYERS.indices:
        writer.update(layer, keys, values)
    assert told == list(LAYERS.indices)


def test_a_step_writes_one_cell_of_each_live_row_and_no_dead_row() -> None:
    pool = KvPool(LAYOUT, LAYERS, 5)
    pool.cells_LCRHSD.fill_(7.0)
    keys, values = cells(3, 1, seed=3), cells(3, 1, seed=4)
    all_keys, all_values = StepWriter(pool, 1, 3, live=[0, 2], positions=[4, 6, 2]).update(3, keys, values)
    wanted = torch.full((5, 2, 8, 3), 7.0)
    wanted[1, :, 4] = keys[0, :, 0]
    wanted[3, :, 2] = keys[2, :, 0]
    assert torch.equal(pool.keys(3), wanted)
    assert torch.equal(pool.values(3)[3, :, 2], values[2, :, 0])
    assert torch.equal(all_keys, wanted[1:4, :, :7])
    assert all_values.shape == (3, 2, 7, 3)
    assert all_keys.data_ptr() == pool.keys(3)[1].data_ptr()


def test_a_step_with_every_row_live_writes_every_row() -> None:
    pool = KvPool(LAYOUT, LAYERS, 3)
    keys, values = cells(3, 1, seed=5), cells(3, 1, seed=6)
    StepWriter(pool, 0, 3, live=[0, 1, 2], positions=[0, 7, 3]).update(2, keys, values)
    for row, position in enumerate([0, 7, 3]):
        assert torch.equal(pool.keys(2)[row, :, position], keys[row, :, 0])
        assert torch.equal(pool.values(2)[row, :, position], values[row, :, 0])
    assert int(pool.keys(2).count_nonzero()) == 3 * 2 * 3


def test_a_step_without_live_rows_writes_nothing() -> None:
    pool = KvPool(LAYOUT, LAYERS, 2)
    StepWriter(pool, 0, 2, live=[], positions=[0, 0]).update(2, cells(2, 1), cells(2, 1))
    assert not pool.cells_LCRHSD.any()


def test_live_rows_out_of_order_get_their_own_cells() -> None:
    pool = KvPool(LAYOUT, LAYERS, 3)
    keys = cells(3, 1, seed=8)
    StepWriter(pool, 0, 3, live=[2, 0], positions=[1, 0, 5]).update(2, keys, keys)
    assert torch.equal(pool.keys(2)[0, :, 1], keys[0, :, 0])
    assert torch.equal(pool.keys(2)[2, :, 5], keys[2, :, 0])


def test_writers_refuse_rows_and_positions_that_the_pool_lacks() -> None:
    pool = KvPool(LAYOUT, LAYERS, 2)
    with pytest.raises(ValueError, match="position 8 lies outside"):
        PromptWriter(pool, [0], [9])
    with pytest.raises(ValueError, match="do not pair up"):
        PromptWriter(pool, [0, 0], [1, 1])
    with pytest.raises(ValueError, match="row 2 position 0 lies outside"):
        StepWriter(pool, 1, 2, live=[0], positions=[0, 0])
    with pytest.raises(ValueError, match="not distinct indices"):
        StepWriter(pool, 0, 2, live=[0, 2], positions=[0, 0])
    with pytest.raises(ValueError, match="a step of 2 rows got cells"):
        StepWriter(pool, 0, 2, live=[0, 1], positions=[0, 0]).update(2, cells(1, 1), cells(1, 1))


def test_a_streaming_writer_hands_over_each_layer_and_returns_the_inputs() -> None:
    seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    keys, values = cells(1, 4, seed=1), cells(1, 4, seed=2)
    attended = StreamingWriter(lambda *layer: seen.append(layer)).update(3, keys, values)
    assert attended == (keys, values)
    assert seen == [(3, keys, values)]
