"""The worker processes of one launcher: which one is a worker's newest, which runs, and whose end is a failure."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from dejavu.ids import WorkerName
from operators.observation import ProcessExit

logger = logging.getLogger(__name__)

H = TypeVar("H")


@dataclass(slots=True, eq=False)
class Entry(Generic[H]):
    """One process of a worker. The roster alone changes it."""

    name: WorkerName
    handle: H
    """The process, or what owns it."""
    pid: int
    """Below 0 until it has begun."""
    is_killed: bool = False
    has_ended: bool = False


class Roster(Generic[H]):
    """What every launcher knows of its processes. Any thread.

    Args:
        log_folder: a file for each worker.
        on_exit: called as soon as a process has ended that nobody asked to.
    """

    def __init__(self, log_folder: Path, on_exit: Callable[[], None]) -> None:
        self._log_folder = log_folder
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._newest: dict[WorkerName, Entry[H]] = {}
        self._running: dict[WorkerName, Entry[H]] = {}
        self._entries: list[Entry[H]] = []
        self._exits: list[ProcessExit] = []
        self._is_stopping = False

    def pid_of(self, name: WorkerName) -> int | None:
        """The worker's newest process, running or not; None for a worker that was not started here."""
        return self.pids().get(name)

    def pids(self) -> dict[WorkerName, int]:
        """The newest process of every worker that was started; below 0: it has not begun."""
        with self._lock:
            return {name: entry.pid for name, entry in self._newest.items()}

    def running(self) -> frozenset[WorkerName]:
        """Workers whose newest process was started, was not killed, and whose end is not among ``exits`` yet."""
        with self._lock:
            return frozenset(self._running)

    def exits(self) -> tuple[ProcessExit, ...]:
        """Ends of newest processes that nobody asked for, oldest first."""
        with self._lock:
            return tuple(self._exits)

    def is_stopping(self) -> bool:
        """True once an end is no failure any more, and nobody is started."""
        with self._lock:
            return self._is_stopping

    def expect_exits(self) -> None:
        """From now on a process that ends is no failure, and nobody is started."""
        with self._lock:
            self._is_stopping = True

    def log_of(self, name: WorkerName) -> Path:
        """Where the worker logs."""
        return self._log_folder / f"{name}.log"

    def _enter(self, name: WorkerName, make: Callable[[], tuple[H, int]]) -> Entry[H] | None:
        """The worker's newest process, which ``make`` has made with its pid; None, and none made, while stopping."""
        with self._lock:
            if self._is_stopping:
                return None
            entry = Entry(name, *make())
            self._newest[name] = self._running[name] = entry
            # Replaced ones stay until they have ended, so that none is left behind.
            self._entries = [old for old in self._entries if not old.has_ended] + [entry]
        return entry

    def _is_wanted(self, entry: Entry[H]) -> bool:
        """False once the process was killed, has ended, has a newer one, or is to end with the run."""
        with self._lock:
            return self._wants(entry)

    def _begun(self, entry: Entry[H], pid: int) -> bool:
        """The process has this pid, if it is still wanted. Returns whether."""
        with self._lock:
            if not self._wants(entry):
                return False
            entry.pid = pid
        return True

    def _take_off(self, name: WorkerName) -> Entry[H] | None:
        """The worker's running process, which is to be killed now and counts as gone; None where there is none."""
        with self._lock:
            entry = self._running.pop(name, None)
            if entry is not None:
                entry.is_killed = True
        return entry

    def _find(self, name: WorkerName, for_what: str) -> Entry[H] | None:
        """The worker's running process; None, and a warning, where there is none."""
        with self._lock:
            entry = self._running.get(name)
        if entry is None:
            logger.warning("worker %s has no process here to be %s", name, for_what)
        return entry

    def _ended(self, entry: Entry[H], status: int) -> None:
        """The process has ended: a failure, unless it was killed, has a newer one, or the run ends."""
        at_s = time.time()
        with self._lock:
            entry.has_ended = True
            is_failure = self._wants(entry)
            if self._running.get(entry.name) is entry:
                del self._running[entry.name]
            if not is_failure:
                return
            self._exits.append(ProcessExit(name=entry.name, status=status, pid=entry.pid, at_s=at_s))
        self._on_exit()

    def _all(self) -> tuple[Entry[H], ...]:
        """Every process that may still be there, replaced ones included, oldest first."""
        with self._lock:
            return tuple(self._entries)

    def _wants(self, entry: Entry[H]) -> bool:
        return self._running.get(entry.name) is entry and not self._is_stopping
