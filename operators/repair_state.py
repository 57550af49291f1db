"""What the recovery operator carries from one pass to the next. Pure values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dejavu.control.journal import Failure, RepairJournal
from dejavu.control.memory import Limits
from dejavu.control.plan import Plan
from dejavu.control.spec_change import SpecChange
from dejavu.ids import Epoch, IncarnationId, WorkerName
from operators.detection import ProcessKey, Suspicion
from operators.launch import Starts
from operators.membership import Attendance


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a repair may do, and how long it waits."""

    may_grow: bool
    """A dead worker's place may be taken by a new process."""
    confirm_s: float
    """How long a broken link waits for the exit or the end of the lease that explains it."""
    patience_s: float
    """How long workers may be missed that a wiped or restarted store has lost."""
    start_timeout_s: float
    """How long a worker may take to serve in a new epoch."""
    starts_processes: bool = True
    """False where somebody else starts workers: who is missed is only told, and no start of theirs is counted."""
    device_memory_bytes: int | None = None
    """What the survivors have for a plan that is cut anew; None: not checked."""
    host_memory_bytes: int | None = None
    """What a worker's host has for KV that is swapped; None: not checked."""

    @property
    def limits(self) -> Limits:
        """Both."""
        return Limits(device_bytes=self.device_memory_bytes, host_bytes=self.host_memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A failure that no plan has answered yet."""

    failure: Failure
    is_dead: bool = True
    """False for a worker that lives and whose links alone are made anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairState:
    """A running cluster between two passes. Times are monotonic seconds."""

    plan: Plan
    """In force: it is in the store, or it is the first one on its way there."""
    pending: Plan | None = None
    """The next one, once decided. Nothing goes on until it is in the store, and it is not changed before."""
    findings: tuple[Finding, ...] = ()
    """Failures that are not fenced, in the order seen."""
    num_covered: int = 0
    """So many of the findings, from the first, ``pending`` answers."""
    has_served: bool = False
    """Every worker has served once: before that a failure ends the run, since a bad start would only be repeated."""
    formed_epoch: Epoch | None = None
    """The newest epoch in which every worker served and the controller was told so."""
    fenced_s: float = 0.0
    """When the plan in force was found in the store."""
    blind_s: float = -math.inf
    """When the store could last not be read: what is waited for is waited for anew from then on."""
    journal: RepairJournal | None = None
    """Of the repair that is going on."""
    finished: tuple[RepairJournal, ...] = ()
    spec: bytes = b""
    """The declared state that the plan answers, as the store is to have it."""
    changes: tuple[SpecChange, ...] = ()
    """Of the declared state, oldest first; the last one may be going on."""
    problem: str | None = None
    """Why the run cannot go on; nothing is decided any more."""
    # Before the cluster serves, a lease that is missed is given the long patience.
    attendance: Attendance = field(default_factory=lambda: Attendance(shaken_until_s=math.inf))
    gone: frozenset[IncarnationId] = frozenset()
    """Incarnations that were declared dead: what they register is not looked at."""
    handled: frozenset[ProcessKey] = frozenset()
    """Processes whose end is known or does not matter any more."""
    suspicions: Mapping[WorkerName, Suspicion] = field(default_factory=dict)
    starts: Starts = field(default_factory=dict)
    unbegun_s: Mapping[WorkerName, float] = field(default_factory=dict)
    """When a worker was last seen to have no process yet: what it may take to serve counts from then on."""
    awaited: Mapping[WorkerName, Epoch] = field(default_factory=dict)
    """Workers that somebody else is to start, and the epoch in which people were last told so."""
    link_breaks: Mapping[WorkerName, float] = field(default_factory=dict)
    """When a worker's links were last made anew for its sake."""
    repairs_s: tuple[float, ...] = ()
    """When the repairs of the last minute began."""

    @property
    def newest(self) -> Plan:
        """The plan that is to be in the store."""
        return self.pending or self.plan

    @property
    def change(self) -> SpecChange | None:
        """The change that is going on."""
        return self.changes[-1] if self.changes and not self.changes[-1].is_over else None

    @property
    def is_fenced(self) -> bool:
        """True while every failure that is known has been answered by the plan in force."""
        return self.pending is None and not self.findings

    @property
    def journals(self) -> tuple[RepairJournal, ...]:
        """Every repair so far, oldest first; the last one may be going on."""
        return self.finished if self.journal is None else (*self.finished, self.journal)

    @property
    def is_hurried(self) -> bool:
        """True while something is to be seen as soon as it happens."""
        repairing = self.journal is not None and self.journal.phase in ("fence", "replace")
        changing = self.change is not None and self.change.phase == "form"
        return repairing or changing or bool(self.suspicions) or bool(self.attendance.missing_since_s)
