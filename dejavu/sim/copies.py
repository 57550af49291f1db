"""How far each token stage, and the copy of it, has come: what a failure finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dejavu.control.holdings import HeldRow
from dejavu.control.plan import LONGEST_COPY_RUN_S, Plan
from dejavu.control.ring import StepRow
from dejavu.ids import RowId, WorkerName
from dejavu.sim.engine import Action, EventEngine
from dejavu.sim.links import Links
from dejavu.sim.rows import RequestState


@dataclass(slots=True)
class _Run:
    """Steps of one microbatch on one stage, with the same rows, whose cells have not left."""

    row_ids: tuple[RowId, ...]
    since_s: float
    step: int = 0
    num_steps: int = 0


class Progress:
    """Of one epoch. Counts steps, not cells: a row's cells follow from the step that was its first."""

    def __init__(self, plan: Plan, links: Links, clock: EventEngine) -> None:
        self._links = links
        self._clock = clock
        self._copy_steps = plan.copy_steps
        self._stages = plan.token_pipeline.stages
        self._holders = {stage.index: _holders(plan, stage.worker) for stage in self._stages}
        self._computed: list[dict[int, int]] = [{} for _ in self._stages]
        self._copied: list[dict[int, int]] = [{} for _ in self._stages]
        self._runs: list[dict[int, _Run]] = [{} for _ in self._stages]
        """Of each stage, by microbatch."""

    def computed(self, stage_index: int, microbatch: int, step: int, rows: Sequence[StepRow]) -> None:
        """The stage has finished the step; its new cells leave, with those of the steps around it, for whoever holds
        its copies."""
        self._computed[stage_index][microbatch] = step
        if not self._holders[stage_index]:
            return
        runs, row_ids = self._runs[stage_index], tuple(row.row_id for row in rows)
        run = runs.get(microbatch)
        if run is None or run.row_ids != row_ids:
            # Rows came or went: the others' cells need not wait for them.
            self._send_run(stage_index, microbatch)
            run = runs[microbatch] = _Run(row_ids, self._clock.now_s)
        run.step = step
        run.num_steps += 1
        if run.num_steps >= self._copy_steps or self._clock.now_s - run.since_s >= LONGEST_COPY_RUN_S:
            self._send_run(stage_index, microbatch)

    def copy_prompt(self, stage_index: int, state: RequestState) -> None:
        """What the stage holds of a row at first is with whoever holds its copies, or on its way."""
        if self._holders[stage_index] and stage_index not in state.copied:
            copied = state.copied
            self._send(stage_index, state.base_cells, lambda: copied.add(stage_index))

    def held(self, rows: Mapping[RowId, tuple[int, RequestState]]) -> dict[WorkerName, list[HeldRow]]:
        """What lies where. ``rows``: microbatch and state of each row."""
        held: dict[WorkerName, list[HeldRow]] = {}
        for row_id, (microbatch, state) in rows.items():
            for stage in self._stages:
                if stage.index not in state.landed:
                    continue
                length = _length(self._computed[stage.index], microbatch, state)
                held.setdefault(stage.worker, []).append(HeldRow(row_id, stage.layers, length, False))
                if stage.index not in state.copied:
                    continue
                length = _length(self._copied[stage.index], microbatch, state)
                for holder in self._holders[stage.index]:
                    held.setdefault(holder, []).append(HeldRow(row_id, stage.layers, length, True))
        return held

    def _send_run(self, stage_index: int, microbatch: int) -> None:
        """What the stage has not sent of the microbatch is on its way."""
        run = self._runs[stage_index].pop(microbatch, None)
        if run is not None:
            copied, step = self._copied[stage_index], run.step
            positions = run.num_steps * len(run.row_ids)
            self._send(stage_index, positions, lambda: copied.__setitem__(microbatch, step))

    def _send(self, stage_index: int, positions: int, arrived: Action) -> None:
        """So many positions of the stage's layers go to all holders; ``arrived`` once the last of them has them."""
        stage, holders = self._stages[stage_index], self._holders[stage_index]
        num_bytes = self._links.kv_bytes(len(stage.layers), positions)
        missing = set(holders)

        def one_arrived(holder: WorkerName) -> None:
            missing.discard(holder)
            if not missing:
                arrived()

        for holder in holders:
            self._links.send(stage.worker, holder, num_bytes, lambda holder=holder: one_arrived(holder))  # type: ignore[misc]


def _length(steps: Mapping[int, int], microbatch: int, state: RequestState) -> int:
    """Positions of the row, after so many steps of its microbatch."""
    if state.first_step is None:
        return state.base_cells
    return state.base_cells + max(0, steps.get(microbatch, 0) - state.first_step + 1)


def _holders(plan: Plan, worker: WorkerName) -> tuple[WorkerName, ...]:
    holders = (*plan.successors_of(worker), *plan.memory_stages)
    return tuple(dict.fromkeys(stage.worker for stage in holders if stage.worker != worker))
