"""Lets each of several workloads on one cluster have faults of its own: steps count from its beginning."""

from __future__ import annotations

from collections.abc import Sequence

from dejavu.control.faults import AtPhase, AtStep, AtTime, Fault, FaultKind, Trigger
from dejavu.ids import WorkerName
from dejavu.serving.overseer import Unwatched, Watcher


class FaultRelay:
    """The watcher of a controller that serves more than once; passes on what it hears to the watcher of the moment.

    The steps that a microbatch had finished before are taken off, so that ``step 5`` is the fifth of this workload.
    """

    def __init__(self) -> None:
        self._to: Watcher = Unwatched()
        self._finished: dict[int, int] = {}
        self._before: dict[int, int] = {}

    def point_at(self, watcher: Watcher | None) -> None:
        """The next workload's watcher; None: nobody."""
        self._to = watcher or Unwatched()
        self._before = dict(self._finished)

    def began(self) -> None:
        """See ``Watcher``."""
        self._to.began()

    def stepped(self, microbatch: int, step: int) -> None:
        """See ``Watcher``."""
        self._finished[microbatch] = step
        self._to.stepped(microbatch, step - self._before.get(microbatch, 0))

    def phase(self, name: str) -> None:
        """See ``Watcher``."""
        self._to.phase(name)


class Several:
    """Tells all of several watchers."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers

    def began(self) -> None:
        """See ``Watcher``."""
        for watcher in self._watchers:
            watcher.began()

    def stepped(self, microbatch: int, step: int) -> None:
        """See ``Watcher``."""
        for watcher in self._watchers:
            watcher.stepped(microbatch, step)

    def phase(self, name: str) -> None:
        """See ``Watcher``."""
        for watcher in self._watchers:
            watcher.phase(name)


def trigger_of(moment: str | int | float) -> Trigger:
    """A phase by its name, a step of microbatch 0 by its number, seconds after the beginning by a float."""
    if isinstance(moment, str):
        return AtPhase(phase=moment)
    return AtTime(at_s=moment) if isinstance(moment, float) else AtStep(microbatch=0, step=moment)


def kill(worker: str, moment: str | int | float) -> Fault:
    """``kill -9`` at the moment."""
    return _fault("kill", worker, moment)


def stop(worker: str, moment: str | int | float, for_s: float | None = None) -> Fault:
    """SIGSTOP at the moment, for ever or for so long."""
    return _fault("stop", worker, moment, for_s=for_s)


def partition(worker: str, moment: str | int | float, for_s: float) -> Fault:
    """Cut off from everybody for so long."""
    return _fault("partition", worker, moment, for_s=for_s)


def slow(worker: str, moment: str | int | float, delay_s: float) -> Fault:
    """So much more before every piece of work; 0 ends it."""
    return _fault("slow", worker, moment, delay_s=delay_s)


def _fault(
    kind: FaultKind, worker: str, moment: str | int | float, *, for_s: float | None = None, delay_s: float = 0.0
) -> Fault:
    return Fault(kind=kind, worker=WorkerName(worker), trigger=trigger_of(moment), for_s=for_s, delay_s=delay_s)
