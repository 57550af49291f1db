"""What the operator and the controller need of whoever brings workers up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from dejavu.ids import WorkerName
from operators.observation import ProcessExit


class Launcher(Protocol):
    """Brings worker processes up, here or elsewhere. What it says of them: see ``Roster``."""

    def start(self, name: WorkerName) -> None:
        """A new process for the worker is starting."""

    def kill(self, name: WorkerName) -> None:
        """The worker's newest process ends now; its end is not among ``exits``."""

    def signal(self, name: WorkerName, signum: int) -> None:
        """The worker's newest process has got the signal; what comes of it is seen like anything else."""

    def tell(self, name: WorkerName, line: bytes) -> None:
        """The worker's newest process will read one more line on its standard input."""

    def pid_of(self, name: WorkerName) -> int | None:
        """The worker's newest process, running or not."""

    def pids(self) -> Mapping[WorkerName, int]:
        """The newest process of every worker that was started; below 0: it has not begun."""

    def running(self) -> frozenset[WorkerName]:
        """Workers whose newest process was started and has not ended."""

    def exits(self) -> tuple[ProcessExit, ...]:
        """Ends that nobody asked for, oldest first."""

    def is_stopping(self) -> bool:
        """True when processes end because the run does."""

    def expect_exits(self) -> None:
        """From now on a process that ends is no failure."""

    def log_of(self, name: WorkerName) -> Path:
        """Where the worker logs."""

    def stop(self) -> None:
        """No process is left."""
