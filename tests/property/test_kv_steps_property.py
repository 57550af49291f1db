"""A step gathered by one operator is, byte for byte, what the general way makes of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dejavu.errors import ConfigError
from dejavu.ids import Epoch, RowId
from dejavu.kv.chunk import ChunkHeader
from dejavu.kv.device import CpuCopier
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.scatter import Staged, pool_region, scatter
from dejavu.kv.staging import StagingRing
from dejavu.kv.steps import Cell, scatter_step

LAYOUT = KvLayout(model_hash="m", num_layers=6, num_kv_heads=4, head_dim=3, dtype="float32", max_length=5)
HELD = LayerRange(1, 6)
NUM_ROWS = 4


def pool() -> KvPool:
    made = KvPool(LAYOUT, HELD, NUM_ROWS, heads=(1, 4))
    made.cells_LCRHSD.copy_(torch.arange(made.cells_LCRHSD.numel(), dtype=torch.float32).view(made.cells_LCRHSD.shape))
    return made


def spans(start: int, stop: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(start, stop - 1), st.integers(start + 1, stop)).filter(lambda pair: pair[0] < pair[1])


cells = st.lists(
    st.tuples(st.integers(0, NUM_ROWS - 1), st.integers(0, LAYOUT.max_length - 1)), min_size=1, max_size=NUM_ROWS
).map(lambda pairs: [(RowId(100 + index), place, position) for index, (place, position) in enumerate(pairs)])


def contents(messages: list[Staged]) -> list[tuple[ChunkHeader, bytes]]:
    found = []
    for staged in messages:
        offset, payload = 0, bytes(staged.payload)
        for chunk in staged.chunks:
            found.append((chunk, payload[offset : offset + chunk.num_bytes]))
            offset += chunk.num_bytes
        staged.buffer.release()
    return found


def step(
    step_cells: list[Cell], layers: LayerRange, heads: tuple[int, int], staging: StagingRing, length: int = 1
) -> list[Staged]:
    return list(
        scatter_step(
            pool(),
            step_cells,
            staging,
            layers=layers,
            heads=heads,
            cluster="c",
            epoch=Epoch(2),
            copier=CpuCopier(),
            length=length,
        )
    )


@given(cells=cells, layers=spans(1, 6), heads=spans(1, 4), rows_per_message=st.integers(1, 4), length=st.integers(1, 5))
def test_steps_are_what_a_region_for_each_row_would_be(
    cells: list[Cell], layers: tuple[int, int], heads: tuple[int, int], rows_per_message: int, length: int
) -> None:
    cells = [(row_id, place, min(position, LAYOUT.max_length - length)) for row_id, place, position in cells]
    held = LayerRange(*layers)
    regions = [
        pool_region(pool(), place, row_id, layers=held, heads=heads, positions=(position, position + length))
        for row_id, place, position in cells
    ]
    general = scatter(regions, StagingRing(8, 1 << 16), cluster="c", epoch=Epoch(2), dtype="float32")
    row_bytes = regions[0].nbytes
    staging = StagingRing(8, rows_per_message * row_bytes)
    messages = step(cells, held, heads, staging, length)
    assert len(messages) == -(-len(cells) // rows_per_message)
    assert contents(messages) == contents(list(general))
    assert staging.num_out == 0


@pytest.mark.parametrize("cell", [(RowId(1), NUM_ROWS, 0), (RowId(1), 0, LAYOUT.max_length), (RowId(1), -1, 0)])
def test_a_cell_outside_the_pool_is_refused(cell: Cell) -> None:
    with pytest.raises(IndexError, match="lie outside a pool of 4 rows, 5 positions"):
        step([cell], HELD, (1, 4), StagingRing(1, 1 << 16))


def test_layers_or_heads_outside_the_pool_are_refused() -> None:
    with pytest.raises(IndexError, match="lie outside the pool's"):
        step([(RowId(1), 0, 0)], LayerRange(0, 2), (1, 4), StagingRing(1, 1 << 16))
    with pytest.raises(IndexError, match="lie outside the pool's"):
        step([(RowId(1), 0, 0)], HELD, (0, 4), StagingRing(1, 1 << 16))


def test_a_buffer_smaller_than_one_position_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="take 360 bytes, a staging buffer 128"):
        step([(RowId(1), 0, 0)], HELD, (1, 4), StagingRing(1, 128))
