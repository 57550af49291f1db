"""Cells between a stage's host store and its slots.

On a CPU rows with the same positions go by one strided copy of all layers. On a CUDA device both ways go through a
pinned buffer: pieces are gathered on their own side and cross the bus in one copy (DejaVu §4.1, buffered copies).
Shape legend: L layers, C the pair (K, V), R rows of a pool, H kv heads, S positions of a pool, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dejavu.kv.device import Copier, Mark
from dejavu.kv.pool import KvPool
from dejavu.kv.slot_cells import CellSpan, SlotCopy
from dejavu.kv.staging import StagingRing

_BUFFER_BYTES = 8 * 2**20
_TIMEOUT_S = 60.0


class SlotCopies:
    """Makes the copies; each call on any one thread, two calls at once only in different ways.

    Args:
        host: microbatch x has rows [x·microbatch_rows, (x+1)·microbatch_rows).
        slots: slot x likewise.
    """

    def __init__(self, host: KvPool, slots: KvPool, microbatch_rows: int, copier: Copier) -> None:
        self._host = host
        self._slots = slots
        self._microbatch_rows = microbatch_rows
        self._copier = copier
        self._cell_bytes = host.cell_bytes(host.layers, host.heads)
        self._host_cells = _cells_of_position_0(host)
        self._slot_cells = _cells_of_position_0(slots)
        self._crossing = _crossing(slots, self._cell_bytes)
        self._bytes = None if slots.device.type != "cpu" else (_bytes_of(host), _bytes_of(slots))

    def make(self, copy: SlotCopy, after: Mark) -> int:
        """The cells are where they should be. Returns their bytes. ``after``: what made them, on the way out."""
        first_host, first_slot = copy.microbatch * self._microbatch_rows, copy.slot * self._microbatch_rows
        if self._crossing is None:
            self._copy_directly(copy, first_host, first_slot)
            return copy.num_cells * self._cell_bytes
        with torch.inference_mode():
            if copy.way == "out":
                self._take_out(self._crossing, copy.spans, first_host, first_slot, after)
            else:
                self._bring_in(self._crossing, copy.spans, first_host, first_slot)
        return copy.num_cells * self._cell_bytes

    def _copy_directly(self, copy: SlotCopy, first_host: int, first_slot: int) -> None:
        assert self._bytes is not None
        host, slots = self._bytes
        for rows, positions in _stretches(copy.spans):
            stored = host[:, :, _after(first_host, rows), :, positions]
            held = slots[:, :, _after(first_slot, rows), :, positions]
            # NumPy moves memory where PyTorch runs a loop over elements: a quarter less time (docs/swapping.md).
            np.copyto(*((held, stored) if copy.way == "in" else (stored, held)))

    def _bring_in(self, crossing: StagingRing, spans: Sequence[CellSpan], first_host: int, first_slot: int) -> None:
        for rows, positions in _pieces(spans, crossing.buffer_bytes // self._cell_bytes):
            source = self._host.cells_LCRHSD[:, :, _after(first_host, rows), :, positions]
            target = self._slots.cells_LCRHSD[:, :, _after(first_slot, rows), :, positions]
            buffer = crossing.acquire(_TIMEOUT_S)
            try:
                buffer.host[: source.nbytes].view(source.dtype).view(source.shape).copy_(source)
                with self._copier.copying(None):
                    buffer.work[: source.nbytes].copy_(buffer.host[: source.nbytes], non_blocking=True)
                    target.copy_(buffer.work[: source.nbytes].view(source.dtype).view(source.shape))
            finally:
                buffer.release()

    def _take_out(
        self, crossing: StagingRing, spans: Sequence[CellSpan], first_host: int, first_slot: int, after: Mark
    ) -> None:
        cells = [(span.row_index, position) for span in spans for position in range(span.start, span.stop)]
        most = crossing.buffer_bytes // self._cell_bytes
        for start in range(0, len(cells), most):
            part = cells[start : start + most]
            source = _index(self._slots, self._slot_cells, part, first_slot).to(self._slots.device)
            target = _index(self._host, self._host_cells, part, first_host)
            slots, host = (pool.cells_LCRHSD.view(-1, pool.layout.head_dim) for pool in (self._slots, self._host))
            buffer, num_bytes = crossing.acquire(_TIMEOUT_S), len(part) * self._cell_bytes
            try:
                with self._copier.copying(after):
                    gathered = buffer.work[:num_bytes].view(slots.dtype).view(-1, slots.shape[1])
                    torch.index_select(slots, 0, source, out=gathered)
                    buffer.copy_to_host(num_bytes)
                host.index_copy_(0, target, buffer.host[:num_bytes].view(host.dtype).view(-1, host.shape[1]))
            finally:
                buffer.release()


def _crossing(slots: KvPool, cell_bytes: int) -> StagingRing | None:
    """Buffers on both sides of a bus, one for each way; None where there is no bus."""
    if slots.device.type == "cpu":
        return None
    return StagingRing(2, max(_BUFFER_BYTES, cell_bytes), pin=True, device=str(slots.device))


def _bytes_of(pool: KvPool) -> NDArray[np.uint8]:
    """The pool's cells without a copy, whatever their type; the last axis is the bytes of a cell."""
    found: NDArray[np.uint8] = pool.cells_LCRHSD.view(torch.uint8).numpy()
    return found


def _pieces(spans: Sequence[CellSpan], most_cells: int) -> Iterator[tuple[slice, slice]]:
    """Rows and positions, at most ``most_cells`` at once."""
    for span in spans:
        for start in range(span.start, span.stop, most_cells):
            rows = slice(span.row_index, span.row_index + 1)
            yield rows, slice(start, min(start + most_cells, span.stop))


def _stretches(spans: Sequence[CellSpan]) -> Iterator[tuple[slice, slice]]:
    """Rows and positions: neighbours with the same positions go together."""
    ordered = sorted(spans, key=lambda span: (span.start, span.stop, span.row_index))
    neighbours = groupby(enumerate(ordered), key=lambda one: (one[1].start, one[1].stop, one[1].row_index - one[0]))
    for (start, stop, _), numbered in neighbours:
        indices = [span.row_index for _, span in numbered]
        yield slice(indices[0], indices[-1] + 1), slice(start, stop)


def _after(first: int, rows: slice) -> slice:
    return slice(first + rows.start, first + rows.stop)


def _cells_of_position_0(pool: KvPool) -> Tensor:
    """Where (layer, kind, head) of row 0, position 0 lies in the pool, counted in cells of D: [L*C*H]."""
    num_heads = pool.heads[1] - pool.heads[0]
    kinds = torch.arange(2 * len(pool.layers))[:, None] * (pool.num_rows * num_heads * pool.layout.max_length)
    return (kinds + torch.arange(num_heads) * pool.layout.max_length).reshape(-1)


def _index(pool: KvPool, first_LCH: Tensor, cells: Sequence[tuple[int, int]], first_row: int) -> Tensor:
    """Where these cells (row, position) lie in the pool, counted in cells of D."""
    row_cells = (pool.heads[1] - pool.heads[0]) * pool.layout.max_length
    rows = torch.tensor([(first_row + row) * row_cells + position for row, position in cells])
    return (rows[:, None] + first_LCH).reshape(-1)
