"""How a cluster stands: ``status.json``, and what ``workflow=status`` prints. Values alone."""

from __future__ import annotations

import msgspec

from dejavu.report.repairs import RepairReceipt

ABSENT, DEAD, JOINING = "absent", "dead", "joining"


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker; what it has not told is None."""

    name: str
    state: str
    """``starting``, ``ready``, ``serving``, ``draining``; ``absent``: not registered; ``dead``: declared so, and still
    registered; ``joining``: serves in an older epoch than the plan's."""
    epoch: int | None = None
    """Of the plan in which it has its place."""
    incarnation: str | None = None
    host: str | None = None
    pid: int | None = None
    address: str | None = None
    device: str | None = None
    memory_bytes: int | None = None
    problem: str | None = None
    """Why it cannot go on."""


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A place of the plan, and who has it."""

    stage: int
    layers: tuple[int, int]
    """Global layer numbers [start, stop)."""
    worker: WorkerStatus
    copied: dict[str, int] = {}
    """By token microbatch: the last step of this stage whose copy was acknowledged."""


class PipelineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Stages in order."""

    kind: str
    microbatch_rows: int
    in_flight: int
    stages: tuple[StageStatus, ...]


class ConditionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A condition for people. ``since_s`` is wall-clock time."""

    status: bool
    reason: str
    since_s: float


class ControllerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Who leads."""

    incarnation: str
    host: str
    pid: int
    address: str


class ChangeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the declared state while the cluster ran. ``asked_s`` is wall-clock time."""

    revision: int
    what: str
    """Keys with their values before and after."""
    phase: str
    """``form``, ``restore``, ``done``, ``refused`` or ``failed``."""
    asked_s: float
    epoch: int | None = None
    """Of the plan that answers it."""
    reason: str | None = None
    """Why it was refused, or has failed."""


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of ``status.json``; what is not in the store is None or empty."""

    cluster: str
    epoch: int | None = None
    mode: str | None = None
    model: str | None = None
    """The model's folder."""
    replication: int | None = None
    controller: ControllerStatus | None = None
    conditions: dict[str, ConditionStatus] = {}
    pipelines: tuple[PipelineStatus, ...] = ()
    standby: tuple[WorkerStatus, ...] = ()
    others: tuple[WorkerStatus, ...] = ()
    """Registered workers that the plan does not name."""
    num_fenced: int = 0
    """Incarnations that were declared dead."""
    repairs: tuple[RepairReceipt, ...] = ()
    """Oldest first; the store keeps the last ones."""
    revision: int | None = None
    """Of the declared state that the plan answers."""
    changes: tuple[ChangeStatus, ...] = ()
    """Oldest first; the store keeps the last ones."""
    unreadable: dict[str, str] = {}
    """Keys whose values are none of ours, and why."""
