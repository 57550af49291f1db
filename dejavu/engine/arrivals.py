"""Rows that a token stage does not compute itself: expected, landed, restored, ready, released."""

from __future__ import annotations

from collections.abc import Sequence

from dejavu.control.ring import Ring
from dejavu.engine import messages as m
from dejavu.engine.host import Host
from dejavu.engine.landed import LandedRows
from dejavu.engine.outflow import Outflow
from dejavu.engine.pool_rows import PoolRows
from dejavu.engine.restoring import Restoring
from dejavu.engine.step_memory import StepMemory
from dejavu.errors import Fatal
from dejavu.ids import RowId


class Arrivals:
    """Main thread only.

    Args:
        rows: what lies in the stage's pool; None where there is none.
        ring: token stage 0's state; None elsewhere.
        landed: rows that arrive by stream; None where none can.
        memory: where steps have their KV; None where there are none.
        out: copies what has arrived.
    """

    def __init__(
        self,
        host: Host,
        *,
        rows: PoolRows | None,
        ring: Ring | None,
        landed: LandedRows | None,
        memory: StepMemory | None,
        out: Outflow,
    ) -> None:
        self._host = host
        self._rows = rows
        self._ring = ring
        self._landed = landed
        self._memory = memory
        self._out = out
        self._restoring = Restoring(rows, landed, out) if rows is not None and landed is not None else None

    def expect(self, rows: Sequence[m.PromptRow]) -> None:
        """These rows' prompts will come from another pipeline."""
        if self._rows is not None:
            places = self._rows.begin(rows)
            self._out.begin(places)
            if self._memory is not None:
                self._memory.settle(places)
        self.landed(self._keeping().expect(rows))

    def restore(self, message: m.RestoreRows) -> None:
        """These rows go on: those that are whole here are ready, the others will come."""
        if self._restoring is None:
            raise Fatal(self._keeps_none)
        here, landed = self._restoring.begin(message)
        self._ready(here)
        self.landed(landed)

    def landed(self, row_ids: Sequence[RowId]) -> None:
        """The rows' KV has landed whole: it is in the pool now, and they are ready."""
        taken = self._keeping().take(row_ids) if row_ids else ()
        if not taken:
            return
        self._note(taken)
        ready = tuple(row_id for row_id, _ in taken)
        fresh = ready if self._restoring is None else self._restoring.take(ready)
        if fresh:
            self._out.prompts(fresh)
        self._ready(ready)

    def release(self, row_ids: Sequence[RowId]) -> None:
        """The rows are forgotten."""
        if self._landed is not None:
            self._landed.release(row_ids)
        if self._rows is not None:
            if self._memory is not None:
                places = (self._rows.place_of(row_id) for row_id in row_ids)
                self._memory.forget([place for place in places if place is not None])
            self._rows.release(row_ids)

    def finish(self) -> None:
        """Rows that had landed whole are in the pool, once nothing lands any more."""
        if self._landed is not None:
            self._note(self._landed.take_all())

    def counts(self) -> dict[str, int]:
        """Chunks by what became of them."""
        return self._landed.counts() if self._landed is not None else {}

    def _note(self, taken: Sequence[tuple[RowId, int]]) -> None:
        if self._rows is not None:
            for row_id, length in taken:
                self._rows.written(row_id, length)

    def _ready(self, row_ids: tuple[RowId, ...]) -> None:
        stage = self._host.place.stage.index
        if self._ring is not None:
            for row_id in row_ids:
                self._ring.row_ready(row_id, stage)
        elif row_ids:
            message = m.RowReady(epoch=self._host.plan.epoch, row_ids=row_ids, stage=stage)
            self._host.tell(self._host.first_worker, message)

    def _keeping(self) -> LandedRows:
        if self._landed is None:
            raise Fatal(self._keeps_none)
        return self._landed

    @property
    def _keeps_none(self) -> str:
        return f"{self._host.place.pipeline.kind} stage {self._host.place.stage.index} takes no rows"
