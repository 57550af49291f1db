"""A whole simulated run: requests arrive, one or several clusters serve them out of one queue, faults strike."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from dejavu.control.faults import Fault, FaultSchedule
from dejavu.control.plan import Plan
from dejavu.errors import DejavuError
from dejavu.ids import RequestId, WorkerName
from dejavu.planning.costs import Costs
from dejavu.request import Request
from dejavu.sim.cluster import SimulatedCluster
from dejavu.sim.engine import EventEngine
from dejavu.sim.machinery import Machinery
from dejavu.sim.repair import RepairRecord
from dejavu.sim.rows import RequestState
from dejavu.sim.station import WorkerTimes
from dejavu.sim.trace import Trace, TraceSpan

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is simulated, but for the requests."""

    plan: Plan
    """Of one set of pipelines."""
    replicas: int = 1
    """So many sets of them serve out of one queue (data parallelism)."""
    costs: Costs
    machinery: Machinery = field(default_factory=Machinery)
    faults: Sequence[Fault] = ()
    """Kills. Workers are numbered through all replicas: those of the second follow those of the first."""
    failures_per_hour: float = 0.0
    """Further kills, a Poisson process over all workers."""
    seed: int = 0
    """Of those."""
    may_grow: bool = True
    """Whether a new process may take a dead worker's place."""
    most_spans: int = 0
    """Kept for a timeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What became of one request."""

    id: RequestId
    arrival_s: float
    first_token_s: float
    end_s: float
    tokens: int
    resumed: int
    """Repairs that it has survived."""

    @property
    def normalized_s(self) -> float:
        """Seconds from arrival to end over its tokens."""
        return (self.end_s - self.arrival_s) / self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """A run that is over. Times in seconds from its start."""

    requests: tuple[Served, ...]
    """In the order in which they were given."""
    makespan_s: float
    """From the start to the last request's end."""
    workers: Mapping[WorkerName, WorkerTimes]
    repairs: tuple[RepairRecord, ...]
    faults_left: int
    """Declared faults whose moment had not come when the last request ended."""
    sent_bytes: int
    """KV that went from worker to worker."""
    most_waiting_bytes: int
    """The most KV of prompts that waited for its rows' first step."""
    num_events: int
    spans: tuple[TraceSpan, ...] = ()
    dropped_spans: int = 0

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return sum(one.tokens for one in self.requests)


def simulate(setting: Setting, requests: Sequence[Request]) -> SimulationResult:
    """The run in which ``requests`` arrive at their times and are served.

    Raises InfeasibleError when too few workers survive, DejavuError when the cluster stands still with requests open.
    """
    return _Simulation(setting).run(requests)


@dataclass(slots=True)
class _Ended:
    """Mutable; the simulation owns it."""

    served: dict[RequestId, Served] = field(default_factory=dict)
    last_s: float = 0.0


class _Simulation:
    def __init__(self, setting: Setting) -> None:
        self._engine = EventEngine()
        self._trace = Trace(setting.most_spans)
        self._setting = setting
        self._ended = _Ended()
        self._schedules: list[FaultSchedule] = []
        self._num_open = 0
        self._queue: deque[Request] = deque()
        self._clusters = [self._cluster(number) for number in range(setting.replicas)]
        self._owners = {name: cluster for cluster in self._clusters for name in cluster.stations}

    def run(self, requests: Sequence[Request]) -> SimulationResult:
        """See ``simulate``."""
        self._num_open = len(requests)
        arrivals = deque(sorted(requests, key=lambda request: request.arrival_s))
        self._plan_faults()
        if arrivals:
            self._engine.at(arrivals[0].arrival_s, lambda: self._arrive(arrivals))
        self._engine.run(until=lambda: self._num_open == 0)
        if self._num_open:
            raise DejavuError(
                f"the simulated cluster stands still at {self._engine.now_s:g} s with {self._num_open} requests open"
            )
        for cluster in self._clusters:
            for station in cluster.stations.values():
                station.finish(self._ended.last_s)
        return self._result(requests)

    def _cluster(self, number: int) -> SimulatedCluster:
        setting = self._setting
        plan = _numbered(setting.plan, number)
        names = {*plan.workers, *plan.standby}
        schedule = FaultSchedule([fault for fault in setting.faults if fault.worker in names])
        at_once = schedule.began(0.0)
        self._schedules.append(schedule)
        cluster = SimulatedCluster(
            plan,
            setting.costs,
            setting.machinery,
            self._engine,
            self._trace,
            faults=schedule,
            may_grow=setting.may_grow,
            ended=self._end,
        )
        if at_once:
            self._engine.at(0.0, lambda: cluster.strike(at_once))
        self._watch(schedule, cluster)
        return cluster

    def _watch(self, schedule: FaultSchedule, cluster: SimulatedCluster) -> None:
        """The schedule is asked again whenever a timed fault is due."""

        def look() -> None:
            cluster.strike(schedule.now(self._engine.now_s))
            self._watch(schedule, cluster)

        if schedule.next_s is not None:
            self._engine.at(schedule.next_s, look)

    def _plan_faults(self) -> None:
        rate = self._setting.failures_per_hour / _HOUR_S
        if not rate:
            return
        draw = random.Random(f"failures {self._setting.seed}")
        names = sorted(self._owners)

        def strike() -> None:
            name = draw.choice(names)
            self._owners[name].kill(name)
            self._engine.after(draw.expovariate(rate), strike)

        self._engine.after(draw.expovariate(rate), strike)

    def _arrive(self, arrivals: deque[Request]) -> None:
        while arrivals and arrivals[0].arrival_s <= self._engine.now_s:
            self._queue.append(arrivals.popleft())
        self._share_out()
        if arrivals:
            self._engine.at(arrivals[0].arrival_s, lambda: self._arrive(arrivals))

    def _share_out(self) -> None:
        """Requests go to whoever has a row for them; a single cluster keeps the queue itself, as the real one does."""
        clusters = self._clusters
        if len(clusters) == 1:
            while self._queue:
                clusters[0].enqueue(self._queue.popleft())
            clusters[0].run_prompts()
            return
        room = {number: cluster.room for number, cluster in enumerate(clusters)}
        while self._queue and (most := max(room, key=lambda number: room[number])) is not None and room[most] > 0:
            clusters[most].enqueue(self._queue.popleft())
            room[most] -= 1
        for cluster in clusters:
            cluster.run_prompts()

    def _end(self, state: RequestState) -> None:
        assert state.first_token_s is not None
        assert state.end_s is not None
        request = state.request
        if request.id in self._ended.served:
            raise DejavuError(f"request {request.id} ended twice")
        self._ended.served[request.id] = Served(
            id=request.id,
            arrival_s=request.arrival_s,
            first_token_s=state.first_token_s,
            end_s=state.end_s,
            tokens=state.num_tokens,
            resumed=state.num_resumed,
        )
        self._ended.last_s = state.end_s
        self._num_open -= 1
        if self._queue:
            # Its row is free only when this event is over.
            self._engine.at(state.end_s, self._share_out)

    def _result(self, requests: Sequence[Request]) -> SimulationResult:
        records = [record for cluster in self._clusters for record in cluster.repairs.records]
        return SimulationResult(
            requests=tuple(self._ended.served[request.id] for request in requests),
            makespan_s=self._ended.last_s,
            workers={name: owner.stations[name].times for name, owner in self._owners.items()},
            repairs=tuple(sorted(records, key=lambda record: record.failed_s)),
            faults_left=sum(schedule.num_waiting for schedule in self._schedules),
            sent_bytes=sum(cluster.total_sent_bytes for cluster in self._clusters),
            most_waiting_bytes=sum(cluster.most_waiting_bytes for cluster in self._clusters),
            num_events=self._engine.num_events,
            spans=tuple(self._trace.spans),
            dropped_spans=self._trace.num_dropped,
        )


def _numbered(plan: Plan, replica: int) -> Plan:
    """The plan with its workers numbered after those of the replicas before it."""
    if replica == 0:
        return plan
    names = [*plan.workers, *plan.standby]
    new = {name: WorkerName(f"w{replica * len(names) + index}") for index, name in enumerate(names)}
    pipelines = tuple(
        msgspec.structs.replace(
            pipeline,
            stages=tuple(msgspec.structs.replace(stage, worker=new[stage.worker]) for stage in pipeline.stages),
        )
        for pipeline in plan.pipelines
    )
    return msgspec.structs.replace(plan, pipelines=pipelines, standby=tuple(new[name] for name in plan.standby))
