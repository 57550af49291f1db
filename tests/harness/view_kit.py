"""A ``ClusterView`` on figures that a test makes up: a service, meters and a store that are told what to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from dejavu.clock import SystemClock
from dejavu.control.journal import Failure, RepairJournal, RestoreReceipt
from dejavu.control.member import Member, MemberState
from dejavu.control.plan import Plan
from dejavu.engine import messages as m
from dejavu.ids import Epoch, IncarnationId, WorkerName
from dejavu.report.counters import LiveFigures, WorkerCounters
from dejavu.serving.latencies import Latencies
from dejavu.serving.meters import LiveMeters
from dejavu.serving.service import ServiceSnapshot
from dejavu.serving.tally import Counts
from dejavu.serving.view import ClusterView, Members

from harness.plans import split_plan

STARTED_S = 1_700_000_000.0


@dataclass(slots=True, kw_only=True)
class MadeUpCluster:
    """What the view sees; change it as the test goes on."""

    plan: Plan = field(default_factory=lambda: split_plan(token=2))
    counts: Counts = field(default_factory=Counts)
    not_ready: str | None = None
    uptime_s: float = 100.0
    states: dict[str, MemberState] | None = field(default_factory=dict)
    """Of the workers that are registered; None: the store is away."""
    journals: Sequence[RepairJournal] = ()
    meters: LiveMeters = field(default_factory=LiveMeters)
    latencies: Latencies = field(default_factory=Latencies)

    def snapshot(self) -> ServiceSnapshot:
        """As ``Service`` tells it."""
        return ServiceSnapshot(
            counts=self.counts,
            rows=4,
            rows_taken=1,
            plan=self.plan,
            not_ready=self.not_ready,
            is_draining=False,
            uptime_s=self.uptime_s,
        )

    def enter(self, epoch: int) -> None:
        """A plan of that epoch is in force."""
        self.plan = msgspec.structs.replace(self.plan, epoch=Epoch(epoch))

    def answer(
        self, worker: str, at_s: float, compute_s: float, *, incarnation: str = "i", sent: int = 0, steps: int = 0
    ) -> None:
        """The worker's meters come."""
        counters = WorkerCounters(
            name=worker,
            pipeline="token",
            stage=0,
            layers=(0, 3),
            compute_s=compute_s,
            steps=steps,
            stream_bytes=int(compute_s * 1_000_000),
            replica_bytes=int(compute_s * 2_000_000),
        )
        figures = LiveFigures(
            incarnation=incarnation,
            at_s=at_s,
            counters=counters,
            sent_bytes={"w2": sent, "controller": 10},
            rows={0: 2, 1: 1},
            kv_used_bytes={"device": 3_000, "replica": 500},
            kv_room_bytes={"device": 10_000},
        )
        message = m.Meters(epoch=self.plan.epoch, worker=WorkerName(worker), figures=figures)
        assert self.meters.heard(message, worker)

    def members(self) -> Members | None:
        """As the operator saw them last."""
        if self.states is None:
            return None
        return {WorkerName(name): _member(name, state, self.plan.epoch) for name, state in self.states.items()}

    def view(self) -> ClusterView:
        """The view on it."""
        return ClusterView(
            cluster="made-up",
            model="a-model",
            clock=SystemClock(),
            service=self,  # type: ignore[arg-type]
            meters=self.meters,
            latencies=self.latencies,
            members=self.members,
            journals=lambda: self.journals,
        )


def _member(name: str, state: MemberState, epoch: Epoch) -> Member:
    return Member(
        name=WorkerName(name),
        incarnation=IncarnationId("i"),
        host="here",
        pid=7,
        address="127.0.0.1:5",
        device="cpu",
        memory_bytes=8_000_000_000,
        state=state,
        epoch=epoch,
    )


def repaired(number: int, *, seen_s: float = STARTED_S) -> RepairJournal:
    """A repair that is over: w1 was killed, and a new process took its place."""
    failure = Failure(
        worker=WorkerName("w1"),
        incarnation=None,
        cause="exit",
        reason="was killed by signal 9",
        seen_s=seen_s,
        since_s=seen_s - 0.1,
    )
    return RepairJournal(
        number=number,
        epoch=Epoch(number + 1),
        failures=(failure,),
        how={WorkerName("w1"): "process"},
        replaced_by={WorkerName("w1"): WorkerName("w1")},
        phase="done",
        fenced_s=seen_s + 0.1,
        replaced_s=seen_s + 2.0,
        receipt=RestoreReceipt(
            restored_s=seen_s + 2.1, resumed_s=seen_s + 2.3, rows={"replica": 3}, resume_steps={0: 17}
        ),
    )
