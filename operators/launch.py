"""Keeps a process for every worker of the plan; one that died is started again with pauses, and not for ever."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dejavu.ids import WorkerName
from operators.actions import StartWorker
from operators.membership import Attendance
from operators.observation import Observed

Starts = Mapping[WorkerName, tuple[float, ...]]
"""When a worker's process was started again, in monotonic seconds, oldest first."""

PAUSES_S = (0.0, 1.0, 2.0, 4.0)
"""Between the decision and the first start of a name, and before each further one; there are no more than these."""
WINDOW_S = 60.0
"""Starts that lie longer ago are forgotten."""


def decide(
    desired: Iterable[WorkerName], attendance: Attendance, observed: Observed, starts: Starts, now_s: float
) -> tuple[StartWorker, ...]:
    """Start what neither runs nor is registered, as soon as its pause is over.

    A worker that registered by itself needs no process. While the store cannot be read nobody is started: a worker
    that runs elsewhere would be started a second time.
    """
    if observed.members is None:
        return ()
    absent = (name for name in desired if name not in observed.running and name not in attendance.seen)
    return tuple(StartWorker(name=name) for name in absent if now_s >= _due_s(starts.get(name, ()), now_s))


def may_start(name: WorkerName, starts: Starts, now_s: float) -> bool:
    """False when the name's starts of the last minute are used up."""
    return len(_recent(starts.get(name, ()), now_s)) < len(PAUSES_S)


def noted(starts: Starts, names: Iterable[WorkerName], now_s: float) -> Starts:
    """The starts after these workers were started now."""
    return {**starts, **{name: (*_recent(starts.get(name, ()), now_s), now_s) for name in names}}


def _recent(times_s: tuple[float, ...], now_s: float) -> tuple[float, ...]:
    return tuple(time_s for time_s in times_s if now_s - time_s < WINDOW_S)


def _due_s(times_s: tuple[float, ...], now_s: float) -> float:
    recent = _recent(times_s, now_s)
    if not recent:
        return now_s
    return recent[-1] + (PAUSES_S[len(recent)] if len(recent) < len(PAUSES_S) else WINDOW_S)
