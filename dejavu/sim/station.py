"""A worker as the simulator sees it: one piece of work at a time, and two links."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dejavu.ids import WorkerName
from dejavu.sim.engine import Action, EventEngine
from dejavu.sim.trace import Trace


@dataclass(slots=True, kw_only=True)
class Work:
    """One pass of a microbatch through one stage."""

    kind: str
    """``prompt`` or ``step``."""
    label: str
    duration_s: float
    begun: Action | None = None
    """Called when it starts."""
    done: Action
    not_before: Callable[[], float] | None = None
    """Asked when its turn has come: until then the stage waits, because the KV is being swapped in."""


@dataclass(slots=True, kw_only=True)
class WorkerTimes:
    """What a worker did with its time. Mutable; the station owns it."""

    busy_s: dict[str, float] = field(default_factory=dict)
    """By kind of work. Work that a death cut short counts as far as it came."""
    idle_s: float = 0.0
    sent_s: float = 0.0
    """Its outgoing link was occupied for so long."""
    swapped_s: float = 0.0
    """Its bus to the device was."""

    @property
    def total_busy_s(self) -> float:
        """Over all kinds of work."""
        return sum(self.busy_s.values())


class Station:
    """A worker that does what has arrived, in order; when nothing has, it asks for work of its own.

    Args:
        own_work: what it starts by itself (token stage 0's next step), or None at the moment.
    """

    def __init__(self, name: WorkerName, engine: EventEngine, trace: Trace) -> None:
        self.name = name
        self.times = WorkerTimes()
        self.bus_free_s = 0.0
        self.own_work: Callable[[], Work | None] | None = None
        self.is_dead = False
        self._engine = engine
        self._trace = trace
        self._queue: deque[Work] = deque()
        self._current: Work | None = None
        self._started_s = 0.0
        self._last_end_s = 0.0
        self._generation = 0

    def give(self, work: Work) -> None:
        """The work is done after what arrived before it; by a dead worker never."""
        if not self.is_dead:
            self._queue.append(work)
            self.look()

    def look(self) -> None:
        """The worker is not idle while there is work for it."""
        if self._current is not None or self.is_dead:
            return
        if self._queue:
            work: Work | None = self._queue.popleft()
        else:
            work = self.own_work() if self.own_work is not None else None
        if work is not None:
            self._start(work)

    def die(self) -> None:
        """The worker does nothing until it is revived."""
        self.drop_all()
        self.is_dead = True

    def revive(self) -> None:
        """A worker of this name lives."""
        self.is_dead = False

    def drop_all(self) -> None:
        """What was under way or waiting here is gone: the worker is dead, or its epoch over."""
        if self._current is not None and self._engine.now_s > self._started_s:
            self._account(self._current, self._engine.now_s)
        self._current = None
        self._generation += 1
        self._queue.clear()
        self.own_work = None

    def finish(self, end_s: float) -> None:
        """The run ended at ``end_s``: what it had not finished by then is cut there, the rest was idle."""
        if self._current is not None and self._started_s < end_s:
            self._account(self._current, end_s)
        self.times.idle_s += end_s - self._last_end_s
        self._last_end_s = end_s

    def _start(self, work: Work) -> None:
        self._current = work
        now_s = self._engine.now_s
        self._started_s = now_s if work.not_before is None else max(now_s, work.not_before())
        generation = self._generation
        self._engine.at(self._started_s + work.duration_s, lambda: self._end(generation))
        if work.begun is not None:
            work.begun()

    def _end(self, generation: int) -> None:
        if generation != self._generation:
            return
        work = self._current
        assert work is not None
        self._account(work, self._engine.now_s)
        self._current = None
        work.done()
        self.look()

    def _account(self, work: Work, end_s: float) -> None:
        self.times.idle_s += self._started_s - self._last_end_s
        self.times.busy_s[work.kind] = self.times.busy_s.get(work.kind, 0.0) + end_s - self._started_s
        self._last_end_s = end_s
        self._trace.add(self.name, work.label, work.kind, self._started_s, end_s)
