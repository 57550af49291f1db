"""A cluster's controller in the simulator: the cluster's admission gives rows, tokens are counted, requests end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dejavu.control.admission import Admission, Assigned
from dejavu.control.faults import FaultAction, FaultSchedule
from dejavu.control.plan import Plan
from dejavu.control.ring import Step
from dejavu.ids import RowId, WorkerName
from dejavu.planning.costs import Costs
from dejavu.request import Request
from dejavu.sim.engine import EventEngine
from dejavu.sim.epoch import Epoch
from dejavu.sim.machinery import Machinery
from dejavu.sim.repair import Repairs
from dejavu.sim.rows import RequestState
from dejavu.sim.station import Station
from dejavu.sim.trace import Trace


class SimulatedCluster:
    """One set of pipelines that serves what it is given, through one epoch after the other.

    Args:
        costs: how long work takes.
        machinery: links, buses, repairs.
        faults: kills of its workers; asked at every step.
        may_grow: whether a new process may take a dead worker's place.
        ended: told of each request's end.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        machinery: Machinery,
        engine: EventEngine,
        trace: Trace,
        *,
        faults: FaultSchedule,
        may_grow: bool,
        ended: Callable[[RequestState], None],
    ) -> None:
        self.engine = engine
        self.stations = {name: Station(name, engine, trace) for name in (*plan.workers, *plan.standby)}
        self.admission = Admission.of(plan)
        self.states: dict[RowId, RequestState] = {}
        """Of the open requests whose prompts were sent."""
        self.steps: dict[int, int] = {}
        """The last finished step of each token microbatch."""
        self.last_token_s: float | None = None
        self.sent_bytes = 0
        """By epochs that are over."""
        self._costs = costs
        self._machinery = machinery
        self._faults = faults
        self._ended = ended
        self._most_waiting_bytes = self._waiting_bytes = 0
        self._row_bytes = plan.model.num_layers * plan.model.layout.position_bytes
        self.begin_epoch(plan)
        self.repairs = Repairs(self, machinery, may_grow=may_grow)

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.epoch.plan

    @property
    def total_sent_bytes(self) -> int:
        """KV that went from worker to worker."""
        return self.sent_bytes + self.epoch.links.sent_bytes

    @property
    def most_waiting_bytes(self) -> int:
        """The most KV of prompts that were done while their rows had yet to step, over all stages."""
        return self._most_waiting_bytes

    @property
    def room(self) -> int:
        """Requests that would have a row at once."""
        token, admission = self.plan.token_pipeline, self.admission
        if self.plan.scheduling == "row":
            return token.num_rows - admission.num_rows_taken - admission.num_waiting
        taken = {row.slot.microbatch for row_id in admission.taken if (row := admission.assigned(row_id)) is not None}
        return (token.in_flight - len(taken)) * token.microbatch_rows - admission.num_waiting

    def begin_epoch(self, plan: Plan) -> None:
        """The workers of ``plan`` wait for work."""
        for name in plan.workers:
            self.stations[name].revive()
        self.epoch = Epoch(plan, self._costs, self._machinery, self.engine, self.stations, self)

    def enqueue(self, request: Request) -> None:
        """The request waits for a row."""
        self.admission.enqueue(request)

    def run_prompts(self) -> None:
        """Every prompt microbatch that may be under way is."""
        if self.epoch.is_over:
            return
        while rows := self.admission.next_prompt():
            for row in rows:
                if row.row_id not in self.states:
                    self.states[row.row_id] = RequestState(request=row.request)
            self.epoch.prompt(rows)

    def strike(self, actions: Sequence[FaultAction]) -> None:
        """The workers that the actions name are dead."""
        for action in actions:
            self.repairs.kill(action.worker)

    def kill(self, worker: WorkerName) -> None:
        """The worker is dead."""
        self.repairs.kill(worker)

    # What the epoch tells.

    def state_of(self, row_id: RowId) -> RequestState | None:
        """See ``Controller``."""
        return self.states.get(row_id)

    def first_tokens(self, rows: tuple[Assigned, ...]) -> None:
        """See ``Controller``."""
        epoch = self.epoch
        for row in rows:
            self._take(row.row_id, row.num_known + 1)
        row_ids = [row.row_id for row in rows]
        continuing = [row_id for row_id in row_ids if row_id in self.states]
        for row_id in continuing:
            self.states[row_id].is_waiting = True
            self._wait_more(self.states[row_id].base_cells)
        for group in self.admission.prompt_done(row_ids, continuing):
            epoch.admit([self.states[row.row_id].admitted(row) for row in group])
        epoch.release([row_id for row_id in row_ids if row_id not in self.states])
        self.run_prompts()
        epoch.look()

    def next_tokens(self, step: Step, tokens: Mapping[RowId, int]) -> None:
        """See ``Controller``."""
        self.steps[step.microbatch] = step.step
        for row_id, token in tokens.items():
            self._take(row_id, token)
        self.strike(self._faults.stepped(step.microbatch, step.step, self.engine.now_s))

    def rows_ended(self, row_ids: Sequence[RowId]) -> None:
        """See ``Controller``."""
        for row_id in row_ids:
            self.admission.free(row_id)
        if row_ids:
            self.run_prompts()

    def first_stepped(self, state: RequestState) -> None:
        """See ``Controller``."""
        if state.is_waiting:
            state.is_waiting = False
            self._wait_more(-state.base_cells)

    def _wait_more(self, positions: int) -> None:
        self._waiting_bytes += positions * self._row_bytes
        self._most_waiting_bytes = max(self._most_waiting_bytes, self._waiting_bytes)

    def forget_waiting(self) -> None:
        """No row waits for its first step: the epoch is over."""
        self._waiting_bytes = 0

    def _take(self, row_id: RowId, token: int) -> None:
        state = self.states[row_id]
        now_s = self.engine.now_s
        self.last_token_s = now_s
        self.repairs.heard()
        if state.take(token, now_s) is not None:
            state.end_s = now_s
            del self.states[row_id]
            self._ended(state)
