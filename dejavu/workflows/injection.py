"""Carries out the faults that a run shall suffer: signals and lines to worker processes, at their moments."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Protocol, assert_never

import msgspec

from dejavu.clock import Clock
from dejavu.config.fault import FaultConfig, FaultEntry
from dejavu.control.faults import AtPhase, AtStep, AtTime, Fault, FaultAction, FaultSchedule, Trigger
from dejavu.ids import WorkerName

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


class Victims(Protocol):
    """The launcher of the workers, as far as faults need it. Any thread."""

    def signal(self, name: WorkerName, signum: int) -> None:
        """The worker's newest process has got the signal, if it still runs."""

    def tell(self, name: WorkerName, line: bytes) -> None:
        """The worker's newest process has got the line on its standard input, if it still reads."""


def faults_of(config: FaultConfig) -> tuple[Fault, ...]:
    """The declared faults, which have been validated."""
    return (
        *(Fault(kind="kill", worker=WorkerName(one.worker), trigger=_trigger(one)) for one in config.kill),
        *(
            Fault(kind="stop", worker=WorkerName(one.worker), trigger=_trigger(one), for_s=one.for_s)
            for one in config.stop
        ),
        *(
            Fault(kind="partition", worker=WorkerName(one.worker), trigger=_trigger(one), for_s=one.for_s)
            for one in config.partition
        ),
        *(
            Fault(kind="slow", worker=WorkerName(one.worker), trigger=_trigger(one), delay_s=one.delay_s or 0.0)
            for one in config.slow
        ),
    )


def _trigger(entry: FaultEntry) -> Trigger:
    if entry.step is not None:
        return AtStep(microbatch=entry.microbatch or 0, step=entry.step)
    if entry.at_s is not None:
        return AtTime(at_s=entry.at_s)
    return AtPhase(phase=entry.phase or "")


class Injector:
    """Strikes workers when their faults are due. The controller's thread tells it how the run goes on.

    A kill is a signal from outside: unlike the launcher's own ``kill``, its exit is a failure that is seen.
    """

    def __init__(self, schedule: FaultSchedule, victims: Victims, clock: Clock) -> None:
        self._schedule = schedule
        self._victims = victims
        self._clock = clock
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._keep_time, name="fault-injector", daemon=True)
        if not schedule.is_over:
            self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Faults that have not come."""
        with self._changed:
            return self._schedule.num_waiting

    def began(self) -> None:
        """Serving has begun: times of faults count from now."""
        with self._changed:
            actions = self._schedule.began(self._clock.monotonic())
            self._changed.notify()
        self._strike(actions)

    def stepped(self, microbatch: int, step: int) -> None:
        """The microbatch has finished the step, and what was due then has been done."""
        with self._changed:
            actions = self._schedule.stepped(microbatch, step, self._clock.monotonic())
            if actions:
                self._changed.notify()
        self._strike(actions)

    def phase(self, name: str) -> None:
        """The run has come to the phase, and what was due then has been done."""
        with self._changed:
            actions = self._schedule.phase(name, self._clock.monotonic())
            if actions:
                self._changed.notify()
        self._strike(actions)

    def look(self) -> None:
        """What is due by its time has been done."""
        with self._changed:
            actions = self._schedule.now(self._clock.monotonic())
        self._strike(actions)

    def close(self) -> None:
        """No more faults. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
        # Who was only to be stopped for a while must not be left so: it is still to be asked for its report.
        with self._changed:
            actions = self._schedule.resume_all()
        self._strike(actions)

    def __enter__(self) -> Injector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _keep_time(self) -> None:
        for _ in self._times():
            self.look()

    def _times(self) -> Iterator[None]:
        """Yields whenever a timed action is due, until this is closed or nothing more can come."""
        while True:
            with self._changed:
                if self._is_closed or self._schedule.is_over:
                    return
                next_s = self._schedule.next_s
                wait_s = None if next_s is None else next_s - self._clock.monotonic()
                if wait_s is None or wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
            yield

    def _strike(self, actions: Iterable[FaultAction]) -> None:
        for action in actions:
            logger.warning("fault: %s %s (%s)", action.kind, action.worker, action.why)
            match action.kind:
                case "kill":
                    self._victims.signal(action.worker, signal.SIGKILL)
                case "stop":
                    self._victims.signal(action.worker, signal.SIGSTOP)
                case "resume":
                    self._victims.signal(action.worker, signal.SIGCONT)
                case "partition":
                    self._victims.tell(action.worker, msgspec.json.encode({"partition_s": action.for_s}))
                case "slow":
                    self._victims.tell(action.worker, msgspec.json.encode({"slow_s": action.delay_s}))
                case _:
                    assert_never(action.kind)
