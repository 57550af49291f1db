"""What operators can do to the cluster. Pure values; the loop carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from dejavu.ids import WorkerName


@dataclass(frozen=True, slots=True, kw_only=True)
class PutSpec:
    """The declared state is to be in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutPlan:
    """The plan in force is to be in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """A process for this worker is to be started."""

    name: WorkerName


@dataclass(frozen=True, slots=True, kw_only=True)
class PutStatus:
    """The conditions for people are to be this value."""

    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRun:
    """The run cannot go on."""

    reason: str
    worker: WorkerName | None = None


Action: TypeAlias = PutSpec | PutPlan | StartWorker | PutStatus | FailRun
