"""What the controller needs of those who keep the cluster whole, and of those who watch it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dejavu.control.journal import RestoreReceipt
from dejavu.control.plan import Plan
from dejavu.engine.messages import AnyMessage
from dejavu.ids import Epoch, WorkerName
from dejavu.serving.cluster_links import ClusterLinks


class Overseer(Protocol):
    """The owner of the cluster. Calls come on the controller's thread and return soon."""

    def why_failed(self) -> str | None:
        """Why the cluster cannot go on, once somebody knows; looked at between events."""

    def suspect(self, worker: str, epoch: Epoch, reason: str) -> None:
        """A link with the worker broke in that epoch; whether it is dead is for the owner to find out."""

    def link(self, plan: Plan, addresses: Mapping[WorkerName, str]) -> ClusterLinks:
        """Links to all workers of a plan that has formed. Raises TransportError when one cannot be reached."""

    def resumed(self, epoch: Epoch, receipt: RestoreReceipt) -> None:
        """Open requests go on in that epoch."""


class Watcher(Protocol):
    """Who is told where a run stands, e.g. to bring about a fault just then. Returns soon."""

    def began(self) -> None:
        """Serving has begun."""

    def stepped(self, microbatch: int, step: int) -> None:
        """The step's tokens have come."""

    def phase(self, name: str) -> None:
        """``prompt``, ``handoff``, ``fence``, ``replace``, ``restore`` or ``resume`` has begun."""


class Meters(Protocol):
    """Who reads the workers' meters while they serve. On the controller's thread; returns soon."""

    def beat(self, links: ClusterLinks, now_s: float) -> None:
        """Workers may be asked now. Comes between events, several times a second, never between two epochs."""

    def heard(self, message: AnyMessage, worker: str) -> bool:
        """A worker has said something that the controller itself does not know. Returns whether it was meant here."""


class Unmetered:
    """The ``Meters`` that reads none."""

    def beat(self, links: ClusterLinks, now_s: float) -> None:
        """Nothing."""

    def heard(self, message: AnyMessage, worker: str) -> bool:
        """Nothing is meant here."""
        return False


class Unwatched:
    """The ``Watcher`` who does nothing."""

    def began(self) -> None:
        """Nothing."""

    def stepped(self, microbatch: int, step: int) -> None:
        """Nothing."""

    def phase(self, name: str) -> None:
        """Nothing."""
