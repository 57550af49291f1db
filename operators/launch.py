"""Keeps a process for every worker of the plan. A worker that has died ends the run: nothing repairs it yet."""

from __future__ import annotations

from collections.abc import Iterable

from dejavu.ids import WorkerName
from operators.actions import Action, FailRun, StartWorker
from operators.observation import Observed


def decide(desired: Iterable[WorkerName], observed: Observed) -> tuple[Action, ...]:
    """Start what is not running, fail on what has ended. A worker that registered by itself needs no process."""
    if observed.exits:
        return tuple(
            FailRun(reason=f"worker {gone.name} died ({gone.text})", worker=gone.name) for gone in observed.exits
        )
    if observed.members is None:
        # A worker that runs elsewhere would be started a second time.
        return ()
    absent = (name for name in desired if name not in observed.running and name not in observed.members)
    return tuple(StartWorker(name=name) for name in absent)
