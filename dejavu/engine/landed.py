"""Rows on their way into a token stage: expected, landed in host memory, then taken into the pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from dejavu.engine.messages import PromptRow
from dejavu.ids import RowId
from dejavu.kv.inbox import KvInbox
from dejavu.kv.pool import KvPool
from dejavu.kv.primitives import stream_in
from dejavu.report.spans import SpanRecorder


class LandedRows:
    """Main thread only; the inbox below it is shared with the landing thread.

    A row that was released is never taken, so a place can be given to another row without waiting for stragglers.
    """

    def __init__(self, inbox: KvInbox, pool: KvPool, microbatch_rows: int, recorder: SpanRecorder) -> None:
        self._inbox = inbox
        self._pool = pool
        self._microbatch_rows = microbatch_rows
        self._recorder = recorder
        self._places: dict[RowId, int] = {}

    def expect(self, rows: Sequence[PromptRow]) -> tuple[RowId, ...]:
        """The rows' places are known. Returns those whose KV had already landed whole."""
        landed: list[RowId] = []
        for row in rows:
            self._places[row.row_id] = row.microbatch * self._microbatch_rows + row.row_index
            landed.extend(self._inbox.expect(row.row_id, row.length).completed)
        return tuple(landed)

    def take(self, row_ids: Iterable[RowId]) -> tuple[tuple[RowId, int], ...]:
        """The rows' KV is in the pool, host memory is free again. Returns the rows taken, which released ones are not,
        with their lengths."""
        taken = []
        for row_id in row_ids:
            place = self._places.pop(row_id, None)
            if place is None:
                continue
            with self._recorder.span("stream_in", "stream", row=int(row_id)):
                landed = self._inbox.take(row_id)
                stream_in(landed, self._pool, place)
                self._inbox.recycle(landed)
            taken.append((row_id, landed.length))
        return tuple(taken)

    def take_all(self) -> tuple[tuple[RowId, int], ...]:
        """As ``take``, of every row that is whole."""
        return self.take([row_id for row_id in list(self._places) if self._inbox.is_complete(row_id)])

    def unproven(self, row_ids: Iterable[RowId]) -> tuple[RowId, ...]:
        """Those of the rows that still wait for KV: a bad chunk does the others no harm."""
        return tuple(row_id for row_id in row_ids if not self._inbox.has_ended(row_id))

    def release(self, row_ids: Iterable[RowId]) -> None:
        """The rows are forgotten; chunks of theirs that come later are dropped and counted."""
        for row_id in row_ids:
            self._places.pop(row_id, None)
            self._inbox.release(row_id)

    def counts(self) -> dict[str, int]:
        """Chunks by what became of them."""
        return dataclasses.asdict(self._inbox.counters)
