"""The launcher of a cluster whose workers are started elsewhere: by hand, Slurm, Kubernetes, systemd."""

from __future__ import annotations

from pathlib import Path
from typing import Never

from dejavu.ids import WorkerName
from operators.roster import Roster


class StartedElsewhere(Roster[Never]):
    """Starts nobody and ends nobody: a place is filled when a worker of its name registers.

    So a dead worker's place waits for whoever starts it again, unless a standby takes it or
    ``strategy.may_grow=false`` gives its layers to the others. Who is missed the operator tells.
    """

    def __init__(self, log_folder: Path) -> None:
        super().__init__(log_folder, on_exit=lambda: None)

    def start(self, name: WorkerName) -> None:
        """Nothing: whoever starts workers does it."""

    def kill(self, name: WorkerName) -> None:
        """Nothing: the fence makes a dead incarnation end by itself."""

    def signal(self, name: WorkerName, signum: int) -> None:
        """Nothing but a warning: its process is another's."""
        self._find(name, f"sent signal {signum}")

    def tell(self, name: WorkerName, line: bytes) -> None:
        """Nothing but a warning: its process is another's."""
        self._find(name, f"told {line!r}")

    def stop(self) -> None:
        """Whoever was placed has been told to stop by the controller."""
        self.expect_exits()
