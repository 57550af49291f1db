"""A served cluster as it is now, for people: what the page shows and ``/state`` gives. Any thread may look."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import msgspec

from dejavu.clock import Clock
from dejavu.control.journal import RepairJournal
from dejavu.control.member import Member
from dejavu.control.plan import Pipeline, Plan, Stage
from dejavu.control.receipts import receipts
from dejavu.control.standing import state_in
from dejavu.ids import WorkerName
from dejavu.report.cluster_status import ABSENT, DEAD
from dejavu.report.repairs import RepairReceipt, repair_line
from dejavu.serving.latencies import Latencies
from dejavu.serving.meters import LiveMeters, Reading
from dejavu.serving.service import Service

MOST_REPAIRS = 10
UNKNOWN = "unknown"
Members = Mapping[WorkerName, Member]


class LinkState(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker sends to another."""

    to: str
    bytes_per_s: float
    total_bytes: int
    """In this epoch."""


class StageState(msgspec.Struct, frozen=True, kw_only=True):
    """A place of the plan and its worker; what the worker has not told yet is None or empty."""

    stage: int
    layers: tuple[int, int]
    """Global layer numbers [start, stop)."""
    worker: str
    state: str
    """See ``WorkerStatus.state``; ``unknown`` while the store is away."""
    host: str | None = None
    pid: int | None = None
    problem: str | None = None
    busy_share: float | None = None
    rows: dict[int, int] = {}
    """By microbatch: rows whose KV is in the stage's pool."""
    prompts: int | None = None
    steps: int | None = None
    kv_used_bytes: dict[str, int] = {}
    kv_room_bytes: dict[str, int] = {}
    links: tuple[LinkState, ...] = ()


class PipelineState(msgspec.Struct, frozen=True, kw_only=True):
    """Stages in order."""

    kind: str
    microbatch_rows: int
    in_flight: int
    stages: tuple[StageState, ...]


class RepairState(msgspec.Struct, frozen=True, kw_only=True):
    """A repair, under way or over."""

    at_s: float
    """Wall-clock time at which it was seen."""
    line: str
    """All of it in a sentence."""
    receipt: RepairReceipt


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of ``/state``. ``now_s`` is wall-clock time."""

    cluster: str
    model: str
    now_s: float
    uptime_s: float
    epoch: int
    mode: str
    not_ready: str | None
    is_draining: bool
    requests: dict[str, int]
    """``submitted`` = ``finished`` + ``aborted`` + ``rejected`` + ``failed`` + ``queued`` + ``running``."""
    rows: int
    rows_taken: int
    tokens_by_second: list[int]
    """Of the last two minutes, the oldest first."""
    pipelines: tuple[PipelineState, ...]
    standby: dict[str, str]
    """State by worker."""
    num_repairs: int
    repairs: tuple[RepairState, ...]
    """The last ones, the newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """Where to look."""

    cluster: str
    model: str
    clock: Clock
    service: Service
    meters: LiveMeters
    latencies: Latencies
    members: Callable[[], Members | None]
    """The registered workers; None while the store is away."""
    journals: Callable[[], Sequence[RepairJournal]]
    """Every repair so far, oldest first."""

    def state(self) -> ClusterState:
        """The cluster now."""
        snapshot, members, journals = self.service.snapshot(), self.members(), self.journals()
        plan = snapshot.plan
        readings = {name: one for name, one in self.meters.readings().items() if one.epoch == plan.epoch}
        return ClusterState(
            cluster=self.cluster,
            model=self.model,
            now_s=self.clock.now(),
            uptime_s=snapshot.uptime_s,
            epoch=plan.epoch,
            mode=plan.mode,
            not_ready=snapshot.not_ready,
            is_draining=snapshot.is_draining,
            requests=asdict(snapshot.counts),
            rows=snapshot.rows,
            rows_taken=snapshot.rows_taken,
            tokens_by_second=self.latencies.tokens_by_second(snapshot.uptime_s),
            pipelines=_pipelines(plan, members, readings),
            standby={name: _state_of(plan, name, members) for name in plan.standby},
            num_repairs=len(journals),
            repairs=_repairs(journals[-MOST_REPAIRS:]),
        )


def _pipelines(plan: Plan, members: Members | None, readings: Mapping[str, Reading]) -> tuple[PipelineState, ...]:
    return tuple(_pipeline(plan, pipeline, members, readings) for pipeline in plan.pipelines)


def _pipeline(
    plan: Plan, pipeline: Pipeline, members: Members | None, readings: Mapping[str, Reading]
) -> PipelineState:
    return PipelineState(
        kind=pipeline.kind,
        microbatch_rows=pipeline.microbatch_rows,
        in_flight=pipeline.in_flight,
        stages=tuple(_stage(plan, stage, members, readings.get(stage.worker)) for stage in pipeline.stages),
    )


def _stage(plan: Plan, stage: Stage, members: Members | None, reading: Reading | None) -> StageState:
    member = (members or {}).get(stage.worker)
    bare = StageState(
        stage=stage.index,
        layers=(stage.layers.start, stage.layers.stop),
        worker=stage.worker,
        state=_state_of(plan, stage.worker, members),
        host=None if member is None else member.host,
        pid=None if member is None else member.pid,
        problem=None if member is None else member.problem,
    )
    # What a worker that is gone said last is no news of it.
    if reading is None or bare.state in (ABSENT, DEAD):
        return bare
    figures = reading.figures
    return msgspec.structs.replace(
        bare,
        busy_share=reading.busy_share,
        rows=figures.rows,
        prompts=figures.counters.prompts,
        steps=figures.counters.steps,
        kv_used_bytes=figures.kv_used_bytes,
        kv_room_bytes=figures.kv_room_bytes,
        links=tuple(
            LinkState(to=peer, bytes_per_s=reading.sent_bytes_per_s.get(peer, 0.0), total_bytes=num_bytes)
            for peer, num_bytes in sorted(figures.sent_bytes.items())
        ),
    )


def _state_of(plan: Plan, name: WorkerName, members: Members | None) -> str:
    return UNKNOWN if members is None else state_in(plan, members.get(name))


def _repairs(journals: Sequence[RepairJournal]) -> tuple[RepairState, ...]:
    told = zip(journals, receipts(journals), strict=True)
    return tuple(
        RepairState(
            at_s=min((failure.seen_s for failure in journal.failures), default=0.0),
            line=repair_line(receipt),
            receipt=receipt,
        )
        for journal, receipt in reversed(list(told))
    )
