"""Faults that a run shall suffer, and when: told how the run goes on, it says what is due. Pure; knows no process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dejavu.ids import WorkerName

FaultKind = Literal["kill", "stop", "partition", "slow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AtStep:
    """When a token microbatch has finished its so many-th step, or a later one."""

    microbatch: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step} of microbatch {self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AtTime:
    """So many seconds after serving began."""

    at_s: float

    def __str__(self) -> str:
        return f"{self.at_s:g} s after serving began"


@dataclass(frozen=True, slots=True, kw_only=True)
class AtPhase:
    """When the run first comes to this phase."""

    phase: str

    def __str__(self) -> str:
        return f"phase {self.phase}"


Trigger: TypeAlias = AtStep | AtTime | AtPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong with one worker, once."""

    kind: FaultKind
    worker: WorkerName
    trigger: Trigger
    for_s: float | None = None
    """Of a stop or a partition: how long; None: for ever."""
    delay_s: float = 0.0
    """Of a slow worker: before every piece of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultAction:
    """What has to be done to a worker now; ``resume`` ends its ``stop``."""

    kind: FaultKind | Literal["resume"]
    worker: WorkerName
    why: str
    for_s: float | None = None
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resume:
    """A stopped worker that goes on at a time of the caller's clock."""

    worker: WorkerName
    at_s: float
    after_s: float


class FaultSchedule:
    """Says which faults are due, each exactly once. Times are one clock's seconds. For one thread at a time."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._waiting = list(faults)
        self._resumes: list[_Resume] = []
        self._began_s: float | None = None

    @property
    def is_over(self) -> bool:
        """True when nothing more can become due."""
        return not self._waiting and not self._resumes

    @property
    def num_waiting(self) -> int:
        """Faults that have not been due."""
        return len(self._waiting)

    @property
    def next_s(self) -> float | None:
        """The time at which the next timed action is due; None: none is known yet."""
        times_s = [resume.at_s for resume in self._resumes]
        if self._began_s is not None:
            times_s += [self._began_s + one.trigger.at_s for one in self._waiting if isinstance(one.trigger, AtTime)]
        return min(times_s, default=None)

    def began(self, now_s: float) -> tuple[FaultAction, ...]:
        """What is due as serving begins; the first call sets the origin of ``AtTime``."""
        if self._began_s is None:
            self._began_s = now_s
        return self.now(now_s)

    def stepped(self, microbatch: int, step: int, now_s: float) -> tuple[FaultAction, ...]:
        """What is due as that microbatch has finished that step. A step that is made again strikes nobody twice."""

        def is_due(trigger: Trigger) -> bool:
            return isinstance(trigger, AtStep) and trigger.microbatch == microbatch and trigger.step <= step

        return self._take(is_due, now_s)

    def phase(self, name: str, now_s: float) -> tuple[FaultAction, ...]:
        """What is due as the run comes to that phase."""
        return self._take(lambda trigger: isinstance(trigger, AtPhase) and trigger.phase == name, now_s)

    def now(self, now_s: float) -> tuple[FaultAction, ...]:
        """What is due by its time alone, the ends of stops included."""
        resumed = [resume for resume in self._resumes if resume.at_s <= now_s]
        self._resumes = [resume for resume in self._resumes if resume.at_s > now_s]
        since_s = -math.inf if self._began_s is None else now_s - self._began_s
        due = self._take(lambda trigger: isinstance(trigger, AtTime) and trigger.at_s <= since_s, now_s)
        return (
            *(
                FaultAction(kind="resume", worker=one.worker, why=f"after {one.after_s:g} s")
                for one in sorted(resumed, key=lambda one: one.at_s)
            ),
            *due,
        )

    def resume_all(self) -> tuple[FaultAction, ...]:
        """Every worker that was stopped for a while goes on now."""
        resumes, self._resumes = self._resumes, []
        return tuple(FaultAction(kind="resume", worker=one.worker, why="the run is over") for one in resumes)

    def _take(self, is_due: Callable[[Trigger], bool], now_s: float) -> tuple[FaultAction, ...]:
        """The due faults as actions, in the order of their declaration; they wait no more."""
        due = [fault for fault in self._waiting if is_due(fault.trigger)]
        if not due:
            return ()
        self._waiting = [fault for fault in self._waiting if fault not in due]
        for fault in due:
            if fault.kind == "stop" and fault.for_s is not None:
                self._resumes.append(_Resume(worker=fault.worker, at_s=now_s + fault.for_s, after_s=fault.for_s))
        return tuple(
            FaultAction(
                kind=fault.kind,
                worker=fault.worker,
                why=str(fault.trigger),
                for_s=fault.for_s,
                delay_s=fault.delay_s,
            )
            for fault in due
        )
