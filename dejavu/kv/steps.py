"""New cells of steps, the same few positions of each of many rows, gathered by one operator into one message an owner.

The general way (``scatter`` over a region for each row) costs several operators and objects a row, and a step has
nothing else to do: this is the buffered copy of DejaVu §4.1 in its shortest form.
Shape legend: N rows of a step, T positions of each, L layers, C the pair (K, V), R rows of a pool, H kv heads,
S positions of the pool, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dejavu.errors import ConfigError
from dejavu.ids import Epoch, RowId
from dejavu.kv.box import Span
from dejavu.kv.chunk import ChunkHeader, max_chunks, seal
from dejavu.kv.device import Copier, Mark
from dejavu.kv.layout import LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.route import Holding, RowSpan, route_from
from dejavu.kv.scatter import Staged
from dejavu.kv.staging import Staging, StagingBuffer
from dejavu.kv.stream_setup import PoolRow

Cell = tuple[RowId, int, int]
"""A row, its place in the pool, and its first position."""
MOST_POSITIONS = 16
"""Of a row; beyond it, copying stretches of memory is cheaper than picking cells."""


def scatter_step(
    pool: KvPool,
    cells: Sequence[Cell],
    staging: Staging,
    *,
    layers: LayerRange,
    heads: Span,
    cluster: str,
    epoch: Epoch,
    copier: Copier,
    length: int = 1,
    after: Mark = None,
    timeout_s: float = 60.0,
) -> Iterator[Staged]:
    """Yields messages that hold ``length`` positions of each row, a chunk for each row, as ``scatter`` would.

    Raises IndexError for a cell outside the pool, and what ``scatter`` raises.
    """
    _check(pool, cells, length, layers, heads)
    row_bytes = length * pool.cell_bytes(layers, heads)
    most = min(staging.buffer_bytes // row_bytes, max_chunks(cluster))
    if most == 0:
        raise ConfigError(
            f"{length} positions of layers [{layers.start},{layers.stop}) heads {list(heads)} take {row_bytes} bytes, "
            f"a staging buffer {staging.buffer_bytes}: use larger staging buffers"
        )
    for start in range(0, len(cells), most):
        part = cells[start : start + most]
        buffer = staging.acquire(timeout_s)
        try:
            with torch.inference_mode(), copier.copying(after):
                _gather(pool, part, length, layers, heads, buffer)
                buffer.copy_to_host(len(part) * row_bytes)
            payload = buffer.payload(len(part) * row_bytes)
            chunks = _seal(part, length, payload, layers, heads, epoch, pool.layout.dtype)
        except BaseException:
            buffer.release()
            raise
        yield Staged(buffer=buffer, chunks=chunks, num_bytes=len(part) * row_bytes)


Owners = tuple[tuple[str, LayerRange, Span], ...]
"""Who gets which layers and heads."""


def one_gather(
    pool: KvPool, rows: Sequence[PoolRow], source: Holding, targets: tuple[Holding, ...], buffer_bytes: int
) -> tuple[int, Owners | None]:
    """The positions of each row and the rows' owners, where ``scatter_step`` can take them; else no owners."""
    lengths = {row.span.length for row in rows}
    length = lengths.pop() if len(lengths) == 1 else MOST_POSITIONS + 1
    owners = owners_of(source, targets) if length <= MOST_POSITIONS else None
    # A row that does not fit whole must be cut.
    fits = owners is not None and all(length * pool.cell_bytes(part[1], part[2]) <= buffer_bytes for part in owners)
    return length, owners if fits else None


@lru_cache(maxsize=64)
def owners_of(source: Holding, targets: tuple[Holding, ...]) -> Owners | None:
    """Who gets which layers and heads of any row; None where a side holds only certain rows or positions.

    Raises RouteError when the targets do not own every cell of the source once.
    """
    if any(holding.rows is not None or holding.positions is not None for holding in (source, *targets)):
        return None
    moves = route_from(source, targets, (RowSpan(row_id=RowId(0), length=1),))
    return tuple((move.target, move.layers, move.heads) for move in moves)


def _gather(
    pool: KvPool, cells: Sequence[Cell], length: int, layers: LayerRange, heads: Span, buffer: StagingBuffer
) -> None:
    """The cells lie in the buffer: [N, L, C, H, T, D]."""
    layer_cells, first_LCH = _strides(pool, layers, heads)
    rows = torch.tensor([place * layer_cells + position for _, place, position in cells])
    index = rows[:, None] + first_LCH
    if length > 1:
        index = index[..., None] + torch.arange(length)
    index = index.reshape(-1).to(pool.device)
    flat = pool.cells_LCRHSD.view(-1, pool.layout.head_dim)
    num_bytes = index.numel() * flat.shape[1] * flat.element_size()
    out = buffer.work[:num_bytes].view(flat.dtype).view(-1, flat.shape[1])
    torch.index_select(flat, 0, index, out=out)


def _strides(pool: KvPool, layers: LayerRange, heads: Span) -> tuple[int, Tensor]:
    """Cells from one row of the pool to the next, and where (layer, kind, head) of row 0, position 0 lies: [L*C*H]."""
    num_positions, num_heads = pool.layout.max_length, pool.heads[1] - pool.heads[0]
    row = num_heads * num_positions
    first = (layers.start - pool.layers.start) * 2
    kinds = torch.arange(first, first + 2 * len(layers))[:, None] * (pool.num_rows * row)
    return row, (kinds + torch.arange(heads[0] - pool.heads[0], heads[1] - pool.heads[0]) * num_positions).reshape(-1)


def _seal(
    cells: Sequence[Cell], length: int, payload: memoryview, layers: LayerRange, heads: Span, epoch: Epoch, dtype: str
) -> tuple[ChunkHeader, ...]:
    row_bytes = payload.nbytes // len(cells)
    return tuple(
        seal(
            epoch=epoch,
            row_id=row_id,
            layers=layers,
            heads=heads,
            positions=(position, position + length),
            dtype=dtype,
            payload=payload[index * row_bytes : (index + 1) * row_bytes],
        )
        for index, (row_id, _, position) in enumerate(cells)
    )


def _check(pool: KvPool, cells: Sequence[Cell], length: int, layers: LayerRange, heads: Span) -> None:
    # The flat index below would read another row's cells without a word.
    for _, place, position in cells:
        if not (0 <= place < pool.num_rows and 0 <= position <= pool.layout.max_length - length):
            raise IndexError(
                f"row {place} positions [{position}, {position + length}) lie outside a pool of {pool.num_rows} rows, "
                f"{pool.layout.max_length} positions"
            )
    inside = pool.layers.start <= layers.start and layers.stop <= pool.layers.stop
    if not (inside and pool.heads[0] <= heads[0] < heads[1] <= pool.heads[1]):
        raise IndexError(f"layers {layers} heads {list(heads)} lie outside the pool's {pool.layers} {list(pool.heads)}")
