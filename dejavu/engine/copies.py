"""Copies of a stage's rows on their way to where the plan says: whole prompts, then every step's new cells."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from dejavu.control.ring import StepRow
from dejavu.engine.messages import KvPart, PromptRow
from dejavu.engine.pool_rows import PoolRows
from dejavu.ids import RowId
from dejavu.kv.chunk import StepMark
from dejavu.kv.disk import DiskMemory
from dejavu.kv.jobs import Pass, RowsJob
from dejavu.kv.layout import LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.route import RowSpan
from dejavu.kv.stream_account import StreamStalled
from dejavu.kv.stream_setup import PoolRow
from dejavu.kv.streamer import Streamer

logger = logging.getLogger(__name__)

_MOST_UNDER_WAY = 64
"""Copies of one row that may not have left yet: more than queue and staging buffers hold."""


class Copies:
    """Main thread only. After ``begin`` no copy reads what was in the rows' places before.

    A step's copy that cannot leave in time does not stop the step: the row is behind, and its next step takes along
    what is missing.

    Args:
        rows: what lies where in the pool.
        lost: rows of which something was sent and did not leave; whoever learns of it adds to it, on any thread.
        disk: where the copies lie, when it is this worker's own disk; None when they go to peers.
    """

    def __init__(
        self, streamer: Streamer, pool: KvPool, rows: PoolRows, lost: deque[RowId], disk: DiskMemory | None
    ) -> None:
        self.streamer = streamer
        self._pool = pool
        self._rows = rows
        self._disk = disk
        self._lost = lost
        self._starts: dict[RowId, deque[int]] = {}
        """From where each of a row's last copies began: a loss is told by the row alone."""
        self._behind: dict[RowId, int] = {}
        """From which position on the holders may lack a row's cells."""

    def begin(self, places: frozenset[int]) -> None:
        """These rows of the pool may be written to. Raises StreamStalled when an old row's copy hangs."""
        self.streamer.settle(places)

    def layer_hook(self, rows: Sequence[PromptRow]) -> Callable[[int], None]:
        """To be called with each global layer as soon as the rows' prompt cells of it are in the pool."""
        spans = [(row.row_id, 0, row.length) for row in rows]
        return lambda layer: self._submit(spans, "prompt", LayerRange(layer, layer + 1))

    def prompts(self, row_ids: Sequence[RowId]) -> None:
        """All that is written of these rows leaves."""
        self.again([(row_id, 0, self._rows.length_of(row_id)) for row_id in row_ids])

    def again(self, spans: Iterable[tuple[RowId, int, int]]) -> None:
        """Positions [start, stop) of these rows leave, in the background where the level allows."""
        self._submit([span for span in spans if span[1] < span[2]], "prompt", None)
        self.streamer.end_pass()

    def step(self, microbatch: int, step: int, rows: Sequence[StepRow]) -> None:
        """Each of the rows has one more cell in every layer."""
        self._note_lost()
        starts = {row.row_id: self._behind.pop(row.row_id, row.position) for row in rows}
        self._note_starts(starts.items())
        new = [
            PoolRow(
                span=RowSpan(row_id=row.row_id, length=row.position + 1 - starts[row.row_id], start=starts[row.row_id]),
                row_index=self._rows.place(microbatch, row.row_index),
            )
            for row in rows
        ]
        try:
            self.streamer.submit_rows(self._pool, new, made_by="step", mark=StepMark(microbatch, step))
        except StreamStalled as error:
            logger.warning("copies stay behind: %s", error)
            self._lost.extend(starts)
        self._note_lost()

    def release(self, row_ids: Sequence[RowId]) -> None:
        """The rows need no copies any more."""
        for row_id in row_ids:
            self._behind.pop(row_id, None)
            self._starts.pop(row_id, None)
            if self._disk is not None:
                self._disk.drop(row_id)

    def send_again(self, parts: Sequence[KvPart]) -> None:
        """The parts leave once more, unless their rows have ended."""
        jobs: list[RowsJob] = []
        for part in parts:
            place = self._rows.place_of(part.row_id)
            # What is asked for comes out of a header that was found corrupt: it may be anything.
            if place is None or not self._holds(part):
                logger.info("KV of row %s was asked for again and is not here", part.row_id)
                continue
            start, stop = part.positions
            span = RowSpan(row_id=part.row_id, length=stop - start, start=start)
            rows = (PoolRow(span=span, row_index=place),)
            jobs.append(RowsJob(pool=self._pool, rows=rows, layers=part.layers, after=None, made_by="step"))
        self.streamer.send_again(jobs)

    def close(self) -> None:
        """Threads and files are gone."""
        self.streamer.close()
        if self._disk is not None:
            self._disk.close()

    def _note_starts(self, starts: Iterable[tuple[RowId, int]]) -> None:
        for row_id, start in starts:
            self._starts.setdefault(row_id, deque(maxlen=_MOST_UNDER_WAY)).append(start)

    def _submit(self, spans: Iterable[tuple[RowId, int, int]], made_by: Pass, layers: LayerRange | None) -> None:
        rows = [
            PoolRow(span=RowSpan(row_id=row_id, length=stop - start, start=start), row_index=place)
            for row_id, start, stop in spans
            if (place := self._rows.place_of(row_id)) is not None
        ]
        if not rows:
            return
        self._note_starts((row.span.row_id, row.span.start) for row in rows)
        try:
            self.streamer.submit_rows(self._pool, rows, made_by=made_by, layers=layers)
        except StreamStalled as error:
            logger.warning("copies stay behind: %s", error)
            self._lost.extend(row.span.row_id for row in rows)

    def _note_lost(self) -> None:
        """Rows that lost something are behind: from the earliest of their copies that may still have been under way."""
        while self._lost:
            row_id = self._lost.popleft()
            if self._rows.place_of(row_id) is not None:
                self._behind[row_id] = min(*self._starts.get(row_id, (0,)), self._behind.get(row_id, sys.maxsize))

    def _holds(self, part: KvPart) -> bool:
        held = self._pool.layers
        inside = held.start <= part.layers.start and part.layers.stop <= held.stop
        return inside and 0 <= part.positions[0] < part.positions[1] <= self._rows.length_of(part.row_id)
