"""A worker of a cluster on paper that can die: its cells are numbers, and a token depends on every one of them.

What it decides with is the real ring and the real plan; what it says goes through links that somebody else delivers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dejavu.control.holdings import CopyAgain, Fetch, HeldRow
from dejavu.control.plan import Fenced, Place, Plan
from dejavu.control.ring import AdmittedRow, Ring
from dejavu.ids import Epoch, IncarnationId, RowId, WorkerName
from dejavu.kv.layout import LayerRange

from harness import recovery_messages as m
from harness.recovery_model import VOCAB_SIZE, RowCells, compute, empty_row, part, whole_length

CONTROLLER = "controller"


@dataclass(slots=True, eq=False)
class Worker:
    """One process. It keeps its cells through epochs; ring and orders are of one epoch."""

    name: WorkerName
    incarnation: IncarnationId
    send: Callable[[Worker, str, Any], None]
    is_alive: bool = True
    is_frozen: bool = False
    epoch: Epoch | None = None
    plan: Plan | None = None
    place: Place | None = None
    ring: Ring | None = None
    num_stale: int = 0
    pools: dict[LayerRange, dict[RowId, RowCells]] = field(default_factory=dict)
    """By the layers that it was cut for; the place's layers name the one in use."""
    copies: dict[tuple[LayerRange, RowId], RowCells] = field(default_factory=lambda: defaultdict(empty_row))
    again: list[CopyAgain] = field(default_factory=list)

    @property
    def is_up(self) -> bool:
        return self.is_alive and not self.is_frozen

    @property
    def can_step(self) -> bool:
        ring = self.ring
        return self.is_up and ring is not None and any(one.live and not one.is_under_way for one in ring._microbatches)

    def join(self, plan: Plan) -> bool:
        """The worker acts in the plan's epoch and in no other. False when it is fenced, or not named, and exits."""
        self.is_alive = Fenced(worker=self.name, incarnation=self.incarnation) not in plan.fenced and (
            self.name in plan.workers or self.name in plan.standby
        )
        if not self.is_alive:
            return False
        self.plan, self.epoch, self.place, self.ring = plan, plan.epoch, plan.place_of(self.name), None
        self.again.clear()
        if self.place is not None:
            self.pools.setdefault(self.place.stage.layers, defaultdict(empty_row))
            if self.place.is_first and self.place.pipeline.kind != "prompt":
                ready = self.place.pipeline.depth if plan.mode == "disaggregated" else 0
                self.ring = Ring(num_microbatches=self.place.pipeline.in_flight, num_ready_stages=ready)
        return True

    def receive(self, epoch: Epoch, body: Any) -> None:
        """What arrives is done, or refused because it is of another epoch."""
        if epoch != self.epoch:
            self.num_stale += 1
            return
        match body:
            case m.RunPrompt():
                self._run_prompt(body)
            case m.RunStep():
                self._run_step(body)
            case m.Cells():
                self._land(body)
            case Fetch():
                self._serve(body)
            case CopyAgain():
                self.again.append(body)
                self._copy_again(body.row_id)
            case m.AskHoldings():
                self.send(self, CONTROLLER, m.Holdings(self.name, tuple(self.holdings())))
            case _:
                self._tell_ring(body)

    def begin_step(self) -> None:
        """The ring's next step is under way."""
        step = self.ring.next_step()
        self._run_step(m.RunStep(step, tuple(row.token for row in step.rows)))

    def holdings(self) -> list[HeldRow]:
        """What is held of each row, in pools and copies."""
        held = [
            HeldRow(row_id, layers, whole_length(cells, layers), False)
            for layers, pool in self.pools.items()
            for row_id, cells in pool.items()
        ]
        return held + [
            HeldRow(row_id, layers, whole_length(cells, layers), True)
            for (layers, row_id), cells in self.copies.items()
        ]

    def stores_of(self, row_id: RowId) -> list[RowCells]:
        """Every place where cells of the row lie, pools first."""
        pools = [pool[row_id] for pool in self.pools.values() if row_id in pool]
        return pools + [cells for (_, copied), cells in self.copies.items() if copied == row_id]

    def _pool(self) -> dict[RowId, RowCells]:
        return self.pools[self.place.stage.layers]

    def _to_stage_0(self, body: Any) -> None:
        self.send(self, self.plan.token_pipeline.stages[0].worker, body)

    def _tell_ring(self, body: Any) -> None:
        match body:
            case AdmittedRow():
                self.ring.admit([body], 0.0)
            case m.Resume():
                self.ring.resume_at(body.steps)
            case m.RowReady():
                self.ring.row_ready(body.row_id, body.stage)
            case m.StepTokens():
                gone = self.ring.complete(body.step.microbatch, body.step.step, body.tokens)
                self.send(self, CONTROLLER, m.RowsEnded(gone))

    def _run_prompt(self, prompt: m.RunPrompt) -> None:
        cells, layers = self._pool()[prompt.row_id], self.place.stage.layers
        out = [compute(cells, layers, position, one) for position, one in enumerate(prompt.activations)]
        if self.place.is_last:
            self.send(self, CONTROLLER, m.PromptToken(prompt.row_id, out[-1] % VOCAB_SIZE))
        else:
            self.send(self, self.place.next_worker, m.RunPrompt(prompt.row_id, tuple(out)))
        if self.place.pipeline.kind == "colocated":
            self._replicate(prompt.row_id, 0, len(out))
            return
        for stage in self.plan.token_pipeline.stages:
            shared = set(layers.indices) & set(stage.layers.indices)
            if shared:
                both = LayerRange(min(shared), max(shared) + 1)
                came = m.Cells(prompt.row_id, both, part(cells, both, 0, len(out)), len(out), False)
                self.send(self, stage.worker, came)

    def _run_step(self, run: m.RunStep) -> None:
        pool, layers = self._pool(), self.place.stage.layers
        out = tuple(
            compute(pool[row.row_id], layers, row.position, one)
            for row, one in zip(run.step.rows, run.activations, strict=True)
        )
        for row in run.step.rows:
            self._replicate(row.row_id, row.position, row.position + 1)
        if not self.place.is_last:
            self.send(self, self.place.next_worker, m.RunStep(run.step, out))
            return
        tokens = {row.row_id: one % VOCAB_SIZE for row, one in zip(run.step.rows, out, strict=True)}
        self._to_stage_0(m.StepTokens(run.step, tokens))
        self.send(self, CONTROLLER, m.StepTokens(run.step, tokens))

    def _replicate(self, row_id: RowId, start: int, stop: int) -> None:
        layers = self.place.stage.layers
        for holder in self.plan.successors_of(self.name):
            cells = part(self._pool()[row_id], layers, start, stop)
            self.send(self, holder.worker, m.Cells(row_id, layers, cells, 0, True))

    def _land(self, came: m.Cells) -> None:
        cells = self.copies[came.layers, came.row_id] if came.is_copy else self._pool()[came.row_id]
        for layer, positions in came.cells.items():
            cells[layer].update(positions)
        if came.is_copy:
            return
        if whole_length(cells, self.place.stage.layers) >= came.whole:
            self._to_stage_0(m.RowReady(came.row_id, self.place.stage.index))
            if self.plan.mode == "disaggregated":
                self._replicate(came.row_id, 0, came.whole)
        self._copy_again(came.row_id)

    def _serve(self, fetch: Fetch) -> None:
        """The cells leave for their target. Raises where this worker does not hold what the controller believes."""
        stores: Sequence[RowCells] = (
            [cells for (_, row_id), cells in self.copies.items() if row_id == fetch.row_id]
            if fetch.is_copy
            else [pool[fetch.row_id] for pool in self.pools.values() if fetch.row_id in pool]
        )
        store = next(one for one in stores if whole_length(one, fetch.layers) >= fetch.length)
        cells = part(store, fetch.layers, 0, fetch.length)
        self.send(self, fetch.target, m.Cells(fetch.row_id, fetch.layers, cells, fetch.length, False))

    def _copy_again(self, row_id: RowId) -> None:
        cells, layers = self._pool()[row_id], self.place.stage.layers
        due = [one for one in self.again if one.row_id == row_id and whole_length(cells, layers) >= one.stop]
        for one in due:
            self.again.remove(one)
            self._replicate(row_id, one.start, one.stop)
