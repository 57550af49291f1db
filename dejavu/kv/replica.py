"""Copies of rows that grow token by token in host memory: what a step streams lands here, verified.

A row's memory comes in blocks of positions, so that it grows with the row and not with the longest one possible.
Shape legend: L layers, C the pair (K, V), H kv heads, P positions of a block, T positions of a row, D head_dim.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dejavu.errors import InvalidTransition
from dejavu.ids import Epoch, RowId
from dejavu.kv.accepted import Accepted, InboxCounters, Tally
from dejavu.kv.box import Span, intersect_spans
from dejavu.kv.chunk import ChunkHeader, KvMessage
from dejavu.kv.coverage import Coverage
from dejavu.kv.flush import bytes_tensor
from dejavu.kv.gate import Gate, Judged
from dejavu.kv.landing import LandingMemory
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.pool import TORCH_DTYPES
from dejavu.kv.route import Holding
from dejavu.kv.stream import LandedRow
from dejavu.kv.tombstones import Tombstones

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLimits:
    """What a store of copies may hold."""

    max_bytes: int
    """Of rows; a chunk that needs more is refused, and its row stays incomplete."""
    block_positions: int = 64
    free_bytes: int = 256 * 1024 * 1024
    """Memory of ended rows that is kept for the next ones."""
    num_tombstones: int = 65536


@dataclass(slots=True)
class _Block:
    memory: Tensor
    cells_LCHPD: Tensor
    coverage: Coverage


@dataclass(slots=True)
class _Row:
    blocks: list[_Block] = field(default_factory=list)
    whole_blocks: int = 0
    """So many blocks from the start are complete."""


class ReplicaStore:
    """Growing copies of the rows of one holding, in one epoch. Any thread; one lock; never waits for anything."""

    def __init__(
        self,
        *,
        cluster: str,
        epoch: Epoch,
        layout: KvLayout,
        holding: Holding,
        limits: ReplicaLimits,
        pin: bool = False,
    ) -> None:
        self._gate = Gate(cluster=cluster, epoch=epoch, layout=layout, holding=holding)
        self._layout = layout
        self._holding = holding
        self._limits = limits
        heads = holding.heads[1] - holding.heads[0]
        self._block_shape = (len(holding.layers), 2, heads, limits.block_positions, layout.head_dim)
        self._block_bytes = math.prod(self._block_shape) * layout.dtype_bytes
        self._memory = LandingMemory(limits.free_bytes, pin)
        self._lock = threading.Lock()
        self._rows: dict[RowId, _Row] = {}
        self._num_blocks = 0
        self._ended = Tombstones(limits.num_tombstones)
        self._counters = InboxCounters()

    def accept(self, message: KvMessage, payload: memoryview) -> Accepted:
        """Every chunk of the message has landed in its row, new or known, or was dropped and counted.

        The payload is not used after the call. Raises nothing for bad bytes: they are reported.
        """
        tally = Tally()
        for judged in self._gate.judge(message, payload):
            with self._lock:
                self._accept(judged, tally)
        return tally.result()

    def renew(self, epoch: Epoch, max_bytes: int | None = None) -> None:
        """Chunks of this epoch are taken from now on, and of no other; what is here stays.

        ``max_bytes`` is the new limit of the rows; None: the one before.
        """
        self._gate = replace(self._gate, epoch=epoch)
        if max_bytes is not None:
            with self._lock:
                self._limits = replace(self._limits, max_bytes=max_bytes)

    @property
    def layers(self) -> LayerRange:
        """The layers whose cells are kept here."""
        return self._holding.layers

    def length(self, row_id: RowId) -> int:
        """So many positions of the row, from 0 on, are here in all layers and heads; 0 for a row that is not."""
        with self._lock:
            row = self._rows.get(row_id)
            return 0 if row is None else self._length(row)

    def landed(self, row_id: RowId, length: int) -> LandedRow:
        """The row's positions [0, length), copied, for ``stream_in``. Raises InvalidTransition unless they are here."""
        with self._lock:
            row = self._rows.get(row_id)
            here = 0 if row is None else self._length(row)
            if row is None or not 1 <= length <= here:
                raise InvalidTransition(f"row {row_id}: positions [0, {length}) were asked for, [0, {here}) are here")
            shape = (*self._block_shape[:3], length, self._layout.head_dim)
            num_bytes = math.prod(shape) * self._layout.dtype_bytes
            memory = torch.empty(num_bytes, dtype=torch.uint8)
            cells_LCHTD = memory.view(TORCH_DTYPES[self._layout.dtype]).view(shape)
            for index, block in enumerate(row.blocks):
                part = self._in_block(index, (0, length))
                if part is not None:
                    whole, inside = part
                    cells_LCHTD[..., whole[0] : whole[1], :] = block.cells_LCHPD[..., inside[0] : inside[1], :]
        holding = self._holding
        return LandedRow(
            row_id=row_id,
            length=length,
            layers=holding.layers,
            heads=holding.heads,
            cells_LCHTD=cells_LCHTD,
            memory=memory,
        )

    def release(self, row_id: RowId) -> None:
        """The row's memory is given up and its late chunks will be dropped. Idempotent; also for a row never seen."""
        with self._lock:
            row = self._rows.pop(row_id, None)
            for block in row.blocks if row is not None else ():
                self._memory.put(block.memory)
                self._num_blocks -= 1
            self._ended.add(row_id)

    def has_ended(self, row_id: RowId) -> bool:
        """True for a row that was released."""
        with self._lock:
            return row_id in self._ended

    @property
    def row_ids(self) -> tuple[RowId, ...]:
        """Rows that are here, whole or in part."""
        with self._lock:
            return tuple(self._rows)

    @property
    def counters(self) -> InboxCounters:
        """A copy of the counters."""
        with self._lock:
            return replace(self._counters)

    @property
    def nbytes(self) -> int:
        """Host bytes of the rows, and of memory kept for the next ones."""
        with self._lock:
            return self._num_blocks * self._block_bytes + self._memory.free_bytes

    @property
    def used_bytes(self) -> int:
        """Host bytes of the rows alone."""
        with self._lock:
            return self._num_blocks * self._block_bytes

    def _accept(self, judged: Judged, tally: Tally) -> None:
        chunk = judged.chunk
        if judged.corrupt is not None:
            self._counters.corrupt += 1
            tally.corrupt.append(chunk)
            logger.warning("chunk of row %s refused: %s", chunk.row_id, judged.corrupt)
        elif judged.stale is not None or chunk.row_id in self._ended:
            self._counters.stale += 1
            tally.dropped += 1
        else:
            self._land(chunk, judged.payload, tally)

    def _land(self, chunk: ChunkHeader, payload: memoryview, tally: Tally) -> None:
        row = self._rows.get(chunk.row_id) or _Row()
        if not self._grow(row, chunk.positions[1]):
            self._counters.refused += 1
            tally.dropped += 1
            logger.warning("chunk of row %s refused: copies may take %s bytes", chunk.row_id, self._limits.max_bytes)
            return
        self._rows[chunk.row_id] = row
        num_new = 0
        shape = (
            len(chunk.layers),
            chunk.kinds[1] - chunk.kinds[0],
            chunk.heads[1] - chunk.heads[0],
            chunk.positions[1] - chunk.positions[0],
            self._layout.head_dim,
        )
        came = bytes_tensor(payload).view(TORCH_DTYPES[self._layout.dtype]).view(shape)
        layers = slice(chunk.layers.start - self._holding.layers.start, chunk.layers.stop - self._holding.layers.start)
        heads = slice(chunk.heads[0] - self._holding.heads[0], chunk.heads[1] - self._holding.heads[0])
        first = chunk.positions[0] // self._limits.block_positions
        last = (chunk.positions[1] - 1) // self._limits.block_positions
        for index in range(first, last + 1):
            part = self._in_block(index, chunk.positions)
            assert part is not None
            whole, inside = part
            block = row.blocks[index]
            source = came[..., whole[0] - chunk.positions[0] : whole[1] - chunk.positions[0], :]
            block.cells_LCHPD[layers, slice(*chunk.kinds), heads, slice(*inside)] = source
            num_new += block.coverage.add(chunk.layers, chunk.heads, inside, chunk.kinds)
        self._counters.accepted += num_new > 0
        self._counters.duplicate += num_new == 0
        self._counters.bytes_landed += chunk.num_bytes
        while row.whole_blocks < len(row.blocks) and row.blocks[row.whole_blocks].coverage.is_complete:
            row.whole_blocks += 1

    def _grow(self, row: _Row, length: int) -> bool:
        """The row has blocks for so many positions; False when the limit forbids it."""
        wanted = -(-length // self._limits.block_positions) - len(row.blocks)
        if wanted > 0 and (self._num_blocks + wanted) * self._block_bytes > self._limits.max_bytes:
            return False
        for _ in range(wanted):
            memory = self._memory.get(self._block_bytes)
            cells = memory[: self._block_bytes].view(TORCH_DTYPES[self._layout.dtype]).view(self._block_shape)
            coverage = Coverage(self._holding.layers, self._holding.heads, self._limits.block_positions)
            row.blocks.append(_Block(memory, cells, coverage))
            self._num_blocks += 1
        return True

    def _length(self, row: _Row) -> int:
        length = row.whole_blocks * self._limits.block_positions
        if row.whole_blocks < len(row.blocks):
            length += row.blocks[row.whole_blocks].coverage.whole_positions
        return length

    def _in_block(self, index: int, positions: Span) -> tuple[Span, Span] | None:
        """The part of ``positions`` that lies in block ``index``: as positions of the row, and of the block."""
        start = index * self._limits.block_positions
        whole = intersect_spans(positions, (start, start + self._limits.block_positions))
        return None if whole is None else (whole, (whole[0] - start, whole[1] - start))
