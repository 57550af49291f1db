"""What operators can do to the cluster. Pure values; the loop carries them out, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from dejavu.control.plan import Plan
from dejavu.ids import WorkerName


@dataclass(frozen=True, slots=True, kw_only=True)
class PutSpec:
    """The declared state is to be in the store, if the store still has what was seen there."""

    previous: bytes | None
    """What was seen; None: no declared state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutPlan:
    """The plan is to be in the store, if the store still has what was seen there. A plan of a new epoch is a fence."""

    plan: Plan
    previous: bytes | None
    """What was seen; None: no plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """The worker's process of ours is to end now, whatever it is doing."""

    name: WorkerName


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """A process for this worker is to be started."""

    name: WorkerName


@dataclass(frozen=True, slots=True, kw_only=True)
class TellFenced:
    """The controller is to know that this plan is in force."""

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TellFormed:
    """The controller is to know that every worker of this plan serves, and where."""

    plan: Plan
    addresses: Mapping[WorkerName, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutJournal:
    """The journal of this repair is to be in the store."""

    number: int
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DropJournal:
    """The journal of this repair is to leave the store."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PutChange:
    """What became of the declared state of this revision is to be in the store."""

    revision: int
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DropChange:
    """What became of the declared state of this revision is to leave the store."""

    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """People are to read this in the log."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PutStatus:
    """The conditions for people are to be this value."""

    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRun:
    """The run cannot go on."""

    reason: str
    worker: WorkerName | None = None


Action: TypeAlias = (
    PutSpec
    | PutPlan
    | KillWorker
    | StartWorker
    | TellFenced
    | TellFormed
    | PutJournal
    | DropJournal
    | PutChange
    | DropChange
    | Say
    | PutStatus
    | FailRun
)
