"""One epoch of a simulated cluster: prompts and steps go through the plan's stages until the plan is out of force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from dejavu.control.admission import Assigned
from dejavu.control.plan import Pipeline, Plan, Stage
from dejavu.control.ring import AdmittedRow, Ring, Step
from dejavu.ids import RowId, WorkerName
from dejavu.planning.costs import Costs
from dejavu.sim.copies import Progress
from dejavu.sim.engine import EventEngine
from dejavu.sim.links import Links, overlap, positions_of
from dejavu.sim.machinery import Machinery
from dejavu.sim.rows import RequestState
from dejavu.sim.station import Station, Work
from dejavu.sim.swapping import swapper_of

Rows = tuple[Assigned, ...]


@dataclass(frozen=True, slots=True)
class _StepCost:
    """What one step takes, whichever stage it is on."""

    whole_s: float
    shortest_s: float
    """With next to no KV to read."""
    hop_s: float
    positions: int
    """Cells that it reads, over all rows, in each layer."""


class _StepStage:
    """What every step asks of a token stage, looked up once."""

    def __init__(self, plan: Plan, stage: Stage, station: Station, machinery: Machinery) -> None:
        self.station = station
        self.num_layers = len(stage.layers)
        self.share = plan.model.share(stage.layers)
        self.swapper = swapper_of(machinery, plan.token_pipeline.in_flight)


class Controller(Protocol):
    """Who is told of tokens, as the cluster's controller is."""

    def first_tokens(self, rows: Rows) -> None:
        """A prompt microbatch has left the last stage."""

    def next_tokens(self, step: Step, tokens: Mapping[RowId, int]) -> None:
        """A step has."""

    def rows_ended(self, row_ids: Sequence[RowId]) -> None:
        """Token stage 0 has no more step for them."""

    def first_stepped(self, state: RequestState) -> None:
        """A row's first step in this epoch has begun."""

    def state_of(self, row_id: RowId) -> RequestState | None:
        """The row's request, while it is open."""


class Epoch:
    """What the workers of one plan do. Nothing of it happens any more once it is over.

    Args:
        stations: every worker that lives, by name.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        machinery: Machinery,
        engine: EventEngine,
        stations: Mapping[WorkerName, Station],
        controller: Controller,
    ) -> None:
        self.plan = plan
        self.links = Links(plan, machinery, engine, stations)
        self.progress = Progress(plan, self.links, engine)
        self.is_over = False
        self._costs = costs
        self._engine = engine
        self._stations = stations
        self._controller = controller
        self._is_split = plan.mode == "disaggregated"
        self._overhead = machinery.streaming_overhead if self._is_split else 1.0
        token = plan.token_pipeline
        self._steps = [_StepStage(plan, stage, stations[stage.worker], machinery) for stage in token.stages]
        self.ring = Ring(num_microbatches=token.in_flight, num_ready_stages=token.depth if self._is_split else 0)
        self._shortest: dict[int, float] = {}
        """Of a step of so many rows, with next to no KV to read."""
        self._missing: dict[RowId, dict[int, int]] = {}
        """Layers that a token stage still lacks of a row whose KV comes from the prompt pipeline."""
        self._steps[0].station.own_work = self._own_step

    def end(self) -> None:
        """The plan is out of force."""
        self.is_over = self.links.is_over = True

    # Prompts.

    def prompt(self, rows: Rows) -> None:
        """Prompt stage 0 has been sent the microbatch."""
        tokens = max(row.length for row in rows)
        whole_s = self._costs.prompt_time_s(len(rows), tokens) * self._overhead
        for row in rows:
            state = self._controller.state_of(row.row_id)
            assert state is not None
            state.base_cells = row.length
            if self._is_split:
                stages = self.plan.token_pipeline.stages
                self._missing[row.row_id] = {stage.index: len(stage.layers) for stage in stages}
        hop_s = self.links.hop_s(len(rows) * tokens)
        self._prompt_at(0, rows, whole_s, hop_s)

    def _prompt_at(self, index: int, rows: Rows, whole_s: float, hop_s: float) -> None:
        if self.is_over:
            return
        pipeline = self.plan.prompt_pipeline
        duration_s = self._share(pipeline, index, whole_s)

        def begun() -> None:
            if self._is_split:
                self._hand_over(pipeline.stages[index], rows, duration_s)

        def done() -> None:
            if not self._is_split:
                for row in rows:
                    self._landed(row.row_id, index)
            if index + 1 == pipeline.depth:
                self._controller.first_tokens(rows)
            else:
                self._engine.soon(hop_s, lambda: self._prompt_at(index + 1, rows, whole_s, hop_s))

        label = f"P{rows[0].row_id}" if len(rows) == 1 else f"P{rows[0].row_id}+{len(rows) - 1}"
        self._station_of(pipeline, index).give(
            Work(kind="prompt", label=label, duration_s=duration_s, begun=begun, done=done)
        )

    def _hand_over(self, source: Stage, rows: Rows, duration_s: float) -> None:
        """The KV that the prompt stage makes from now on goes to the token stages that have its layers."""
        start_s, positions = self._engine.now_s, positions_of(rows)
        for target in self.plan.token_pipeline.stages:
            first, stop = overlap(source, target)
            if first < stop:
                self.links.send_layers(
                    source.worker,
                    target.worker,
                    (first, stop),
                    positions,
                    start_s,
                    duration_s / len(source.layers),
                    start_s + duration_s,
                    partial(self._arrived, target, rows, stop - first),
                )

    def _arrived(self, target: Stage, rows: Rows, num_layers: int) -> None:
        if self.is_over:
            return
        for row in rows:
            missing = self._missing.get(row.row_id)
            if missing is None:
                continue
            missing[target.index] -= num_layers
            if not missing[target.index]:
                self.ready(row.row_id, target.index)
        self.look()

    def ready(self, row_id: RowId, stage_index: int) -> None:
        """The token stage holds all that the row's next step needs of it."""
        if self.is_over:
            return
        self._landed(row_id, stage_index)
        self.ring.row_ready(row_id, stage_index)

    def _landed(self, row_id: RowId, stage_index: int) -> None:
        state = self._controller.state_of(row_id)
        if state is None:
            return
        state.landed.add(stage_index)
        self.progress.copy_prompt(stage_index, state)

    # Tokens.

    def admit(self, rows: Sequence[AdmittedRow]) -> None:
        """Token stage 0 has been told of the rows."""
        self.ring.admit(rows, self._engine.now_s)

    def release(self, row_ids: Sequence[RowId]) -> None:
        """Rows that their first token ended take no step."""
        self._forget(row_ids)
        self._controller.rows_ended(self.ring.release(row_ids))

    def look(self) -> None:
        """Token stage 0 starts what it can."""
        self._steps[0].station.look()

    def _own_step(self) -> Work | None:
        step = self.ring.next_step()
        if step is None:
            return None
        positions = longest = 0
        for row in step.rows:
            positions += row.position
            longest = max(longest, row.position)
            state = self._controller.state_of(row.row_id)
            if state is not None and state.first_step is None:
                state.first_step = step.step
                self._controller.first_stepped(state)
        # A stage computes all rows from the first live one to the last, each as far as the longest.
        num_rows = step.rows[-1].row_index - step.rows[0].row_index + 1
        whole_s = self._costs.step_time_s(num_rows, longest)
        hop_s = self.links.hop_s(num_rows) if len(self._steps) > 1 else 0.0
        return self._step_work(
            0, step, _StepCost(whole_s, self._shortest_s(num_rows), hop_s, positions + len(step.rows))
        )

    def _shortest_s(self, num_rows: int) -> float:
        if num_rows not in self._shortest:
            self._shortest[num_rows] = self._costs.step_time_s(num_rows, 1)
        return self._shortest[num_rows]

    def _step_at(self, index: int, step: Step, cost: _StepCost) -> None:
        if not self.is_over:
            self._steps[index].station.give(self._step_work(index, step, cost))

    def _step_work(self, index: int, step: Step, cost: _StepCost) -> Work:
        stage, engine = self._steps[index], self._engine
        is_last = index + 1 == len(self._steps)

        def done() -> None:
            self.progress.computed(index, step.microbatch, step.step, step.rows)
            if stage.swapper is not None:
                stage.swapper.done(step.microbatch, engine.now_s)
            if is_last:
                engine.soon(cost.hop_s, lambda: self._complete(step))
            else:
                engine.soon(cost.hop_s, lambda: self._step_at(index + 1, step, cost))

        def resident_s() -> float:
            assert stage.swapper is not None
            num_bytes = self.links.kv_bytes(stage.num_layers, cost.positions)
            return stage.swapper.resident_s(stage.station, step.microbatch, num_bytes, engine.now_s)

        return Work(
            kind="step",
            label=f"T{step.microbatch}.{step.step}",
            duration_s=stage.share.step_s(cost.whole_s, cost.shortest_s),
            done=done,
            not_before=None if stage.swapper is None else resident_s,
        )

    def _complete(self, step: Step) -> None:
        if self.is_over:
            return
        tokens = {row.row_id: row.token + 1 for row in step.rows}
        ended = self.ring.complete(step.microbatch, step.step, tokens)
        self._controller.next_tokens(step, tokens)
        self._forget(ended)
        self._controller.rows_ended(ended)
        self.look()

    def _forget(self, row_ids: Sequence[RowId]) -> None:
        for row_id in row_ids:
            self._missing.pop(row_id, None)

    def _share(self, pipeline: Pipeline, index: int, whole_s: float) -> float:
        return whole_s * len(pipeline.stages[index].layers) / self.plan.model.num_layers

    def _station_of(self, pipeline: Pipeline, index: int) -> Station:
        return self._stations[pipeline.stages[index].worker]
