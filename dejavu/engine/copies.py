"""Copies of a stage's rows on their way to where the plan says: whole prompts, then every step's new cells."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from dejavu.clock import Clock, SystemClock
from dejavu.control.plan import LONGEST_COPY_RUN_S
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


class _Run:
    """Steps of one microbatch, one after the other, with the same rows."""

    __slots__ = ("first_positions", "num_steps", "row_ids", "rows", "since_s", "step")

    def __init__(self, rows: Sequence[StepRow], since_s: float) -> None:
        self.row_ids = tuple(row.row_id for row in rows)
        self.first_positions = tuple(row.position for row in rows)
        self.rows = rows
        """Of the newest step."""
        self.step = 0
        self.num_steps = 0
        self.since_s = since_s


class Copies:
    """Main thread only. After ``begin`` no copy reads what was in the rows' places before.

    A step's copy that cannot leave in time does not stop the step: the row is behind, and its next step takes along
    what is missing.

    Args:
        rows: what lies where in the pool.
        lost: rows of which something was sent and did not leave; whoever learns of it adds to it, on any thread.
        disk: where the copies lie, when it is this worker's own disk; None when they go to peers.
        copy_steps: so many steps of a microbatch leave together at most.
    """

    def __init__(
        self,
        streamer: Streamer,
        pool: KvPool,
        rows: PoolRows,
        lost: deque[RowId],
        disk: DiskMemory | None,
        *,
        copy_steps: int = 1,
        clock: Clock | None = None,
    ) -> None:
        self.streamer = streamer
        self._pool = pool
        self._rows = rows
        self._disk = disk
        self._copy_steps = copy_steps
        self._clock = clock or SystemClock()
        self._runs: dict[int, _Run] = {}
        """By microbatch: steps that have not left."""
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
        """Each of the rows has one more cell in every layer. It leaves with those of the steps around it."""
        run = self._runs.get(microbatch)
        if run is None or run.row_ids != tuple(row.row_id for row in rows):
            # Rows came or went: the others' cells need not wait for them.
            self._send(microbatch)
            run = self._runs[microbatch] = _Run(rows, self._clock.monotonic())
        run.step, run.rows = step, rows
        run.num_steps += 1
        if run.num_steps >= self._copy_steps or self._clock.monotonic() - run.since_s >= LONGEST_COPY_RUN_S:
            self._send(microbatch)

    def flush(self) -> None:
        """All cells that there are have been handed over."""
        for microbatch in list(self._runs):
            self._send(microbatch)

    def _send(self, microbatch: int) -> None:
        run = self._runs.pop(microbatch, None)
        if run is None:
            return
        self._note_lost()
        spans = [
            (row.row_id, self._behind.pop(row.row_id, first), row.position + 1)
            for row, first in zip(run.rows, run.first_positions, strict=True)
        ]
        self._submit(spans, "step", None, StepMark(microbatch, run.step))
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

    def _submit(
        self,
        spans: Iterable[tuple[RowId, int, int]],
        made_by: Pass,
        layers: LayerRange | None,
        mark: StepMark | None = None,
    ) -> None:
        rows = [
            PoolRow(span=RowSpan(row_id=row_id, length=stop - start, start=start), row_index=place)
            for row_id, start, stop in spans
            if (place := self._rows.place_of(row_id)) is not None
        ]
        if not rows:
            return
        self._note_starts((row.span.row_id, row.span.start) for row in rows)
        try:
            self.streamer.submit_rows(self._pool, rows, made_by=made_by, layers=layers, mark=mark)
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
