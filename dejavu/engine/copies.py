"""Copies of a stage's rows on their way to where the plan says: whole prompts, then every step's new cells."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from dejavu.control.ring import StepRow
from dejavu.engine.messages import KvPart, PromptRow
from dejavu.ids import RowId
from dejavu.kv.disk import DiskMemory
from dejavu.kv.jobs import Pass, RowsJob
from dejavu.kv.layout import LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.route import RowSpan
from dejavu.kv.stream_setup import PoolRow
from dejavu.kv.streamer import Streamer

logger = logging.getLogger(__name__)


class Copies:
    """Main thread only. A place of the pool may be written to after ``begin``: no copy reads the row before any more.

    Args:
        disk: where the copies lie, when it is this worker's own disk; None when they go to a peer.
    """

    def __init__(self, streamer: Streamer, pool: KvPool, microbatch_rows: int, disk: DiskMemory | None) -> None:
        self.streamer = streamer
        self._pool = pool
        self._microbatch_rows = microbatch_rows
        self._disk = disk
        self._rows: dict[RowId, tuple[int, int]] = {}
        """Place in the pool, and how many positions are written."""

    def begin(self, rows: Sequence[PromptRow]) -> None:
        """The rows' prompts may be written to their places. Raises StreamStalled when an old row's copy hangs."""
        places = frozenset(self._place(row.microbatch, row.row_index) for row in rows)
        self.streamer.settle(places)
        self._rows = {row_id: at for row_id, at in self._rows.items() if at[0] not in places}
        self._rows.update({row.row_id: (self._place(row.microbatch, row.row_index), row.length) for row in rows})

    def layer_hook(self, rows: Sequence[PromptRow]) -> Callable[[int], None]:
        """To be called with each global layer as soon as the rows' prompt cells of it are in the pool."""
        row_ids = [row.row_id for row in rows]
        return lambda layer: self._submit(row_ids, "prompt", LayerRange(layer, layer + 1))

    def prompts(self, row_ids: Sequence[RowId]) -> None:
        """The rows' whole prompts are in the pool."""
        self._submit(row_ids, "prompt", None)
        self.streamer.end_pass()

    def step(self, microbatch: int, rows: Sequence[StepRow]) -> None:
        """Each of the rows has one more cell in every layer."""
        new = [
            PoolRow(
                span=RowSpan(row_id=row.row_id, length=1, start=row.position),
                row_index=self._place(microbatch, row.row_index),
            )
            for row in rows
        ]
        for row in rows:
            self._rows[row.row_id] = (self._place(microbatch, row.row_index), row.position + 1)
        self.streamer.submit_rows(self._pool, new, made_by="step")

    def release(self, row_ids: Sequence[RowId]) -> None:
        """The rows need no copies any more."""
        for row_id in row_ids:
            self._rows.pop(row_id, None)
            if self._disk is not None:
                self._disk.drop(row_id)

    def send_again(self, parts: Sequence[KvPart]) -> None:
        """The parts leave once more, unless their rows have ended."""
        jobs: list[RowsJob] = []
        for part in parts:
            known = self._rows.get(part.row_id)
            # What is asked for comes out of a header that was found corrupt: it may be anything.
            if known is None or not self._holds(part, known[1]):
                logger.info("KV of row %s was asked for again and is not here", part.row_id)
                continue
            start, stop = part.positions
            span = RowSpan(row_id=part.row_id, length=stop - start, start=start)
            rows = (PoolRow(span=span, row_index=known[0]),)
            jobs.append(RowsJob(pool=self._pool, rows=rows, layers=part.layers, after=None, made_by="step"))
        self.streamer.send_again(jobs)

    def close(self) -> None:
        """Threads and files are gone."""
        self.streamer.close()
        if self._disk is not None:
            self._disk.close()

    def _submit(self, row_ids: Sequence[RowId], made_by: Pass, layers: LayerRange | None) -> None:
        rows = [
            PoolRow(span=RowSpan(row_id=row_id, length=self._rows[row_id][1]), row_index=self._rows[row_id][0])
            for row_id in row_ids
            if row_id in self._rows
        ]
        if rows:
            self.streamer.submit_rows(self._pool, rows, made_by=made_by, layers=layers)

    def _holds(self, part: KvPart, num_written: int) -> bool:
        held = self._pool.layers
        inside = held.start <= part.layers.start and part.layers.stop <= held.stop
        return inside and 0 <= part.positions[0] < part.positions[1] <= num_written

    def _place(self, microbatch: int, row_index: int) -> int:
        return microbatch * self._microbatch_rows + row_index
