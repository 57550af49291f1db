"""A repair as it is told: the JSON value of ``/dejavu/<cluster>/repairs/<n>`` and of ``metrics.json``. Pure values."""

from __future__ import annotations

from typing import Literal

import msgspec

from dejavu.ids import Epoch, IncarnationId, WorkerName

Cause = Literal["exit", "lease", "link", "problem"]
"""How a failure was noticed: the process ended, its lease ran out, a link broke for good, or the worker said so."""
Replacement = Literal["standby", "process", "replan", "links"]
"""Who takes a dead worker's place: a standby, a new process, the survivors; or nobody died and links are made anew."""
RepairPhase = Literal["fence", "replace", "restore", "resume", "done", "failed"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that was declared dead. Times are wall-clock seconds since the Unix epoch."""

    worker: WorkerName
    incarnation: IncarnationId | None
    """None for a worker that had not registered."""
    cause: Cause
    reason: str
    seen_s: float
    since_s: float | None = None
    """When it happened, where somebody knows: the end of the process, or the first sign of trouble."""


class RestoreReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller did to let the rows go on in the new epoch."""

    restored_s: float
    """Wall-clock time at which every stage had been told where each row's KV comes from."""
    resumed_s: float
    """Wall-clock time of the first token after it; equal to ``restored_s`` when no row was open."""
    last_token_s: float | None = None
    """Wall-clock time of the last token before the repair; None when there was none."""
    rows: dict[str, int] = {}
    """Rows by tier: ``replica``, ``recompute``, ``restart``."""
    resume_steps: dict[int, int] = {}
    """By token microbatch: the last finished step that the rows go on from."""
    steps_recomputed: dict[int, int] = {}
    """By token microbatch: steps whose tokens had been seen and are made again."""
    bytes_restored: int = 0
    """KV that the stages fetch from copies."""
    bytes_replicated: int = 0
    """KV that is copied again because its copy was lost."""


class RepairJournal(msgspec.Struct, frozen=True, kw_only=True):
    """One repair, from the first failure seen to the first token after it."""

    number: int
    epoch: Epoch
    """The newest plan's; it grows when another worker dies meanwhile."""
    failures: tuple[Failure, ...]
    how: dict[WorkerName, Replacement] = {}
    replaced_by: dict[WorkerName, WorkerName] = {}
    phase: RepairPhase = "fence"
    fenced_s: float | None = None
    """Wall-clock time at which the newest plan was in the store."""
    replaced_s: float | None = None
    """Wall-clock time at which every worker of it served."""
    receipt: RestoreReceipt | None = None
    problem: str | None = None
    """Why the repair was given up."""
