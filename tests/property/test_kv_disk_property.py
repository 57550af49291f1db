"""Chunks in any order, repeated, over restarts: what is read back is exact, or says what is missing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dejavu.ids import Epoch, RowId
from dejavu.kv.disk import DiskLimits, DiskMemory
from dejavu.kv.disk_row import RowIncomplete, read_row
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.primitives import flush_staged, pool_region, scatter
from dejavu.kv.route import Holding
from dejavu.kv.staging import StagingRing

LAYOUT = KvLayout(model_hash="m", num_layers=3, num_kv_heads=2, head_dim=3, dtype="float32", max_length=6)
LAYERS = LayerRange(0, 3)
NUM_ROWS = 2
WAIT_S = 30.0

Written = tuple[int, tuple[int, int], tuple[int, int], tuple[int, int]]
"""Row index, layers, heads, positions."""


def numbered_pool() -> KvPool:
    pool = KvPool(LAYOUT, LAYERS, NUM_ROWS)
    pool.cells_LCRHSD.copy_(torch.arange(pool.cells_LCRHSD.numel()).view(pool.cells_LCRHSD.shape))
    return pool


def spans(limit: int) -> st.SearchStrategy[tuple[int, int]]:
    pairs = st.tuples(st.integers(0, limit - 1), st.integers(1, limit))
    return pairs.filter(lambda pair: pair[0] < pair[1])


boxes = st.tuples(st.integers(0, NUM_ROWS - 1), spans(3), spans(2), spans(6))
batches = st.lists(st.lists(boxes, min_size=1, max_size=4), max_size=6)


def write(pool: KvPool, batch: list[Written], into: DiskMemory) -> None:
    staging = StagingRing(1, 1 << 12)
    regions = [
        pool_region(pool, row, RowId(row), layers=LayerRange(*layers), heads=heads, positions=positions)
        for row, layers, heads, positions in batch
    ]
    for staged in scatter(regions, staging, cluster="c", epoch=Epoch(1), dtype="float32"):
        flush_staged(staged, "c", Epoch(1), into).result(WAIT_S)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), written=batches, direct=st.sampled_from([None, False]))
def test_any_order_and_repetition_reads_back_exactly_or_names_a_missing_cell(
    data: st.DataObject, written: list[list[Written]], direct: bool | None
) -> None:
    pool = numbered_pool()
    holding = Holding(owner="t", layers=LayerRange(*data.draw(spans(3))), heads=data.draw(spans(2)))
    length = data.draw(st.integers(1, 6))
    limits = DiskLimits(write_bytes=4096, open_rows=data.draw(st.integers(1, 2)))
    restart_after = data.draw(st.integers(0, len(written)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in (written[:restart_after], written[restart_after:]):
            with DiskMemory(folder, limits=limits, direct=direct) as memory:
                for batch in part:
                    write(pool, batch, memory)
        for row in range(NUM_ROWS):
            check(folder, pool, row, holding, length, [box for batch in written for box in batch if box[0] == row])


def check(folder: Path, pool: KvPool, row: int, holding: Holding, length: int, written: list[Written]) -> None:
    wanted = {
        (layer, head, position)
        for layer in holding.layers.indices
        for head in range(*holding.heads)
        for position in range(length)
    }
    there = {
        (layer, head, position)
        for _, layers, heads, positions in written
        for layer in range(*layers)
        for head in range(*heads)
        for position in range(*positions)
    }
    missing = sorted(wanted - there)
    if not missing:
        landed = read_row(folder, RowId(row), cluster="c").landed(LAYOUT, holding, length)
        cells = pool.cells(row, holding.layers, holding.heads, (0, length))
        assert torch.equal(landed.cells_LCHTD, cells)
    else:
        layer, head, position = missing[0]
        words = f"{2 * len(missing)} cells missing, first layer {layer} K head {head} position {position}"
        with pytest.raises(RowIncomplete, match=words if written else "nothing of row"):
            read_row(folder, RowId(row), cluster="c").landed(LAYOUT, holding, length)
