"""The launcher of a cluster whose workers are started elsewhere: by hand, Slurm, Kubernetes, systemd."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from dejavu.ids import WorkerName
from operators.observation import ProcessExit

logger = logging.getLogger(__name__)


class StartedElsewhere:
    """Starts nobody and ends nobody: a place is filled when a worker of its name registers.

    So a dead worker's place waits for whoever starts it again, unless a standby takes it or
    ``strategy.may_grow=false`` gives its layers to the others.
    """

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._is_stopping = False
        self._missed: set[WorkerName] = set()

    def start(self, name: WorkerName) -> None:
        """People know that a worker is missed."""
        if name not in self._missed:
            logger.info("worker %s is to be started elsewhere", name)
        self._missed.add(name)

    def kill(self, name: WorkerName) -> None:
        """Nothing: the fence makes a dead incarnation end by itself."""

    def signal(self, name: WorkerName, signum: int) -> None:
        """Nothing: its process is another's."""
        logger.warning("worker %s was started elsewhere and does not get signal %d", name, signum)

    def tell(self, name: WorkerName, line: bytes) -> None:
        """Nothing: its process is another's."""
        logger.warning("worker %s was started elsewhere and is not told %r", name, line)

    def pid_of(self, name: WorkerName) -> int | None:
        """None: no process is ours."""
        return None

    def pids(self) -> Mapping[WorkerName, int]:
        """No process is ours."""
        return {}

    def running(self) -> frozenset[WorkerName]:
        """No process is ours."""
        return frozenset()

    def exits(self) -> tuple[ProcessExit, ...]:
        """No process is ours."""
        return ()

    def is_stopping(self) -> bool:
        """True once an end is no failure any more."""
        return self._is_stopping

    def expect_exits(self) -> None:
        """From now on a worker that ends is no failure."""
        self._is_stopping = True

    def log_of(self, name: WorkerName) -> Path:
        """Where a worker started here would log; there is no such file."""
        return self._log_folder / f"{name}.log"

    def stop(self) -> None:
        """Whoever was placed has been told to stop by the controller."""
        self.expect_exits()
