"""The shape of the group ``fault``: what shall go wrong in a run, for tests and for measurements. See ``schema.py``."""

from __future__ import annotations

from dataclasses import dataclass, field

FAULT_PHASES = ("prompt", "handoff", "fence", "replace", "restore", "resume")
"""Moments that a run passes: the first prompt is sent; its first row goes to the token stages; a repair's steps."""


@dataclass(kw_only=True)
class FaultEntry:
    """Whom a fault strikes, once, and when: of ``step``, ``at_s`` and ``phase`` exactly one is given."""

    worker: str = ""
    step: int | None = None
    """When ``microbatch`` has finished this step of its own count, 1 being its first."""
    microbatch: int | None = None
    """Of ``step``; None: the first, 0."""
    at_s: float | None = None
    """So long after serving began."""
    phase: str | None = None
    """One of ``FAULT_PHASES``: when the run first comes to it."""


@dataclass(kw_only=True)
class KillFault(FaultEntry):
    """A worker that is killed (SIGKILL)."""


@dataclass(kw_only=True)
class StopFault(FaultEntry):
    """A worker that is frozen (SIGSTOP)."""

    for_s: float | None = None
    """Until it goes on; None: for ever."""


@dataclass(kw_only=True)
class PartitionFault(FaultEntry):
    """A worker that is cut off from everybody, the store included."""

    for_s: float | None = None
    """How long; needed."""


@dataclass(kw_only=True)
class SlowFault(FaultEntry):
    """A worker that waits before every piece of work."""

    delay_s: float | None = None
    """How long, needed; 0: it is fast again."""


@dataclass(kw_only=True)
class FaultConfig:
    """All that shall go wrong."""

    kill: list[KillFault] = field(default_factory=list)
    stop: list[StopFault] = field(default_factory=list)
    partition: list[PartitionFault] = field(default_factory=list)
    slow: list[SlowFault] = field(default_factory=list)
