"""The receiving side: verified chunks land in their row's own host memory until the whole row is proven to be there.

A row is *expected* (its length is known), *complete* (every cell of [0, length) in all layers and heads of this
holding came in a verified chunk), then *taken*, or *released* at any time. Both ends leave a tombstone, so that a
late chunk of an aborted or repeated attempt can never land in somebody else's row: it is dropped and counted.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass, replace

from torch import Tensor

from dejavu.errors import InvalidTransition
from dejavu.ids import Epoch, RowId
from dejavu.kv.accepted import Accepted, InboxCounters, Tally
from dejavu.kv.chunk import ChunkHeader, KvMessage
from dejavu.kv.coverage import Coverage
from dejavu.kv.early import EarlyChunks
from dejavu.kv.gate import Gate, Judged
from dejavu.kv.landing import LandingMemory
from dejavu.kv.layout import KvLayout
from dejavu.kv.pool import TORCH_DTYPES
from dejavu.kv.route import Holding
from dejavu.kv.scatter import gather
from dejavu.kv.stream import LandedRow
from dejavu.kv.tombstones import Tombstones

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxLimits:
    """What the inbox may keep beyond the rows that it was told to expect."""

    early_bytes: int = 256 * 1024 * 1024
    """Chunks of rows that are not expected yet; beyond it the longest waiting row's are dropped."""
    free_landing_bytes: int = 1024 * 1024 * 1024
    """Host memory of ended rows that is kept for the next ones."""
    num_tombstones: int = 65536
    """Ended rows that are remembered one by one; of older ones only the highest id, below which nothing is new."""


@dataclass(slots=True)
class _Row:
    length: int
    memory: Tensor
    cells_LCHTD: Tensor
    coverage: Coverage


class KvInbox:
    """Host memory for the rows of one holding, in one epoch. Any thread; one lock; never waits for anything.

    ``pin`` makes the landing memory page-locked, for a CUDA device's copies.
    """

    def __init__(
        self,
        *,
        cluster: str,
        epoch: Epoch,
        layout: KvLayout,
        holding: Holding,
        limits: InboxLimits | None = None,
        pin: bool = False,
    ) -> None:
        self._gate = Gate(cluster=cluster, epoch=epoch, layout=layout, holding=holding)
        self._layout = layout
        self._holding = holding
        self._limits = limits or InboxLimits()
        self._memory = LandingMemory(self._limits.free_landing_bytes, pin)
        self._lock = threading.Lock()
        self._rows: dict[RowId, _Row] = {}
        self._early = EarlyChunks(self._limits.early_bytes)
        self._ended = Tombstones(self._limits.num_tombstones)
        self._counters = InboxCounters()

    def prepare(self, num_rows: int, length: int) -> None:
        """Host memory for so many rows of that length lies ready and touched, within the limit on free memory.

        Optional: without it, the first rows pay for fresh pages while they land, at a tenth of the speed.
        """
        with self._lock:
            buffers = [self._make_row(length).memory.zero_() for _ in range(num_rows)]
            for buffer in buffers:
                self._memory.put(buffer)

    def expect(self, row_id: RowId, length: int) -> Accepted:
        """The row has host memory for ``length`` positions, and chunks that came before are in it.

        Repeating it changes nothing. Raises InvalidTransition for another length or a row that has ended,
        ValueError for a length beyond the layout's.
        """
        if not 1 <= length <= self._layout.max_length:
            raise ValueError(f"row {row_id}: length {length} is not within 1..{self._layout.max_length}")
        tally = Tally()
        with self._lock:
            known = self._rows.get(row_id)
            if known is None and row_id in self._ended:
                raise InvalidTransition(f"row {row_id} was taken or released before; a new attempt needs a new row id")
            if known is not None and known.length != length:
                raise InvalidTransition(f"row {row_id} was expected with length {known.length}, now with {length}")
            if known is None:
                self._rows[row_id] = self._make_row(length)
                for header, payload in self._early.pop(row_id):
                    self._land(header, payload, tally)
        return tally.result()

    def accept(self, message: KvMessage, payload: memoryview) -> Accepted:
        """Every chunk of the message has landed, waits for its row, or was dropped and counted.

        The payload is not used after the call, so the transport may have it back. Raises nothing for bad bytes:
        they are reported.
        """
        tally = Tally()
        for judged in self._gate.judge(message, payload):
            # The verdict needs no lock, and checksums are the longest part.
            with self._lock:
                self._accept(judged, tally)
        return tally.result()

    def take(self, row_id: RowId) -> LandedRow:
        """The complete row, which the inbox then forgets. Raises InvalidTransition when it is not complete.

        Give it to ``recycle`` when its cells have been copied.
        """
        with self._lock:
            row = self._rows.get(row_id)
            if row is None or not row.coverage.is_complete:
                raise InvalidTransition(f"row {row_id} cannot be taken: {self._words(row_id)}")
            del self._rows[row_id]
            self._end(row_id)
        return LandedRow(
            row_id=row_id,
            length=row.length,
            layers=self._holding.layers,
            heads=self._holding.heads,
            cells_LCHTD=row.cells_LCHTD,
            memory=row.memory,
        )

    def recycle(self, landed: LandedRow) -> None:
        """The taken row's memory is for other rows; the caller has no more use for its cells. Once for each row."""
        with self._lock:
            self._memory.put(landed.memory)

    def release(self, row_id: RowId) -> None:
        """The row's memory is given up and its late chunks will be dropped, whatever had come. Idempotent."""
        with self._lock:
            self._end(row_id)

    def has_ended(self, row_id: RowId) -> bool:
        """True for a row that was taken or released."""
        with self._lock:
            return row_id in self._ended

    def is_complete(self, row_id: RowId) -> bool:
        """True for a row that can be taken."""
        with self._lock:
            row = self._rows.get(row_id)
            return row is not None and row.coverage.is_complete

    def describe(self, row_id: RowId) -> str:
        """What the inbox has of a row, and the first cell that is missing, for an error message."""
        with self._lock:
            return self._words(row_id)

    @property
    def counters(self) -> InboxCounters:
        """A copy of the counters."""
        with self._lock:
            return replace(self._counters)

    @property
    def num_rows(self) -> int:
        """Rows that are expected and neither taken nor released."""
        with self._lock:
            return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Host bytes of these rows, of early chunks, and of memory kept for the next rows."""
        with self._lock:
            landing = sum(row.memory.nbytes for row in self._rows.values())
            return landing + self._early.nbytes + self._memory.free_bytes

    def _make_row(self, length: int) -> _Row:
        layers, heads = self._holding.layers, self._holding.heads
        shape = (len(layers), 2, heads[1] - heads[0], length, self._layout.head_dim)
        num_bytes = math.prod(shape) * self._layout.dtype_bytes
        memory = self._memory.get(num_bytes)
        cells = memory[:num_bytes].view(TORCH_DTYPES[self._layout.dtype]).view(shape)
        return _Row(length, memory, cells, Coverage(layers, heads, length))

    def _accept(self, judged: Judged, tally: Tally) -> None:
        chunk = judged.chunk
        if judged.corrupt is not None:
            self._count_corrupt(chunk, tally, judged.corrupt)
        elif judged.stale is not None:
            self._count_stale(tally)
            logger.info("a stale chunk dropped: %s", judged.stale)
        elif chunk.row_id in self._rows:
            self._land(chunk, judged.payload, tally)
        elif chunk.row_id in self._ended:
            self._count_stale(tally)
        else:
            self._keep_early(chunk, judged.payload, tally)

    def _land(self, chunk: ChunkHeader, payload: memoryview, tally: Tally) -> None:
        row = self._rows[chunk.row_id]
        if chunk.positions[1] > row.length:
            self._count_corrupt(chunk, tally, f"positions {list(chunk.positions)}, the row's length is {row.length}")
            return
        if row.coverage.covers(chunk.layers, chunk.heads, chunk.positions, chunk.kinds):
            self._counters.duplicate += 1
            tally.dropped += 1
            return
        first = (self._holding.layers.start, self._holding.heads[0], 0)
        gather(chunk, payload, row.cells_LCHTD, first=first)
        row.coverage.add(chunk.layers, chunk.heads, chunk.positions, chunk.kinds)
        self._counters.accepted += 1
        self._counters.bytes_landed += chunk.num_bytes
        if row.coverage.is_complete:
            tally.completed.append(chunk.row_id)

    def _keep_early(self, chunk: ChunkHeader, payload: memoryview, tally: Tally) -> None:
        num_dropped = self._early.keep(chunk, payload)
        self._counters.early += 1
        self._counters.early_dropped += num_dropped
        tally.dropped += num_dropped
        if num_dropped:
            logger.warning("%s early chunks dropped: more than %s bytes wait", num_dropped, self._limits.early_bytes)

    def _end(self, row_id: RowId) -> None:
        row = self._rows.pop(row_id, None)
        if row is not None:
            self._memory.put(row.memory)
        self._early.pop(row_id)
        self._ended.add(row_id)

    def _count_stale(self, tally: Tally) -> None:
        self._counters.stale += 1
        tally.dropped += 1

    def _count_corrupt(self, chunk: ChunkHeader, tally: Tally, reason: str) -> None:
        self._counters.corrupt += 1
        tally.corrupt.append(chunk)
        logger.warning("chunk of row %s refused: %s", chunk.row_id, reason)

    def _words(self, row_id: RowId) -> str:
        row = self._rows.get(row_id)
        if row is not None:
            return row.coverage.words
        return "it has ended" if row_id in self._ended else "it is not expected"
