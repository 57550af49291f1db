"""A worker's links in one epoch: to the peers that the plan gives it, and to the controller."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from dejavu.clock import Clock
from dejavu.control.plan import Plan
from dejavu.engine.cluster_view import ClusterView
from dejavu.engine.peers import CONTROLLER, Peers
from dejavu.errors import Fatal
from dejavu.ids import WorkerName
from dejavu.transport.base import TransportError

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
"""Of one try: a peer may die or freeze while it is connected to, and a newer plan must be seen soon."""


class StoppedEarly(Fatal):
    """Asked to stop before serving: nothing is wrong with the worker."""

    def __init__(self) -> None:
        super().__init__("asked to stop before serving")


class DeclaredDead(Fatal):
    """Others went on without this incarnation."""


class ControllerGone(Fatal):
    """Nobody says how to go on."""


class Superseded(Exception):
    """A newer plan is in force."""


class Linking:
    """On the main thread.

    A peer that is not ready yet is waited for without an end: when it has taken too long, and whose place that is then,
    the operator says, by a newer plan.

    Args:
        timeout_s: how long a peer that is ready may be unreachable.
    """

    def __init__(
        self,
        plan: Plan,
        name: WorkerName,
        peers: Peers,
        view: ClusterView,
        clock: Clock,
        *,
        is_stopping: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        self.peers = peers
        self._plan = plan
        self._name = name
        self._view = view
        self._clock = clock
        self._is_stopping = is_stopping
        self._timeout_s = timeout_s

    def connect(self) -> None:
        """Every peer is linked. Raises Superseded once there is a newer plan; Fatal, TransportError in the end."""
        for name in self._plan.peers_of(self._name):
            self._link(name, lambda name=name: self._ready_address(name))  # type: ignore[misc]
        self._link(CONTROLLER, self._controller_address)

    def reach(self, name: WorkerName) -> None:
        """A link to that worker is up, whether the plan foresees one or not. Raises TransportError."""
        if name in self.peers.names or name == self._name:
            return
        member = self._view.member(name)
        if member is None:
            raise TransportError("it is not registered", peer=name, phase="connect")
        self.peers.connect(name, member.address, timeout_s=_CONNECT_TIMEOUT_S)

    def _link(self, name: str, address_of: Callable[[], str | None]) -> None:
        deadline_s: float | None = None
        while True:
            address = self._view.wait_for(address_of, f"worker {name}", math.inf)
            deadline_s = self._clock.monotonic() + self._timeout_s if deadline_s is None else deadline_s
            try:
                self.peers.connect(name, address, timeout_s=min(self._plan.timeout_s, _CONNECT_TIMEOUT_S))
                return
            except TransportError as error:
                # A peer that has just died, or is not that far yet; a newer plan will say so.
                logger.warning("no link to %s yet: %s", name, error)
                if self._clock.monotonic() >= deadline_s:
                    raise

    def _ready_address(self, name: str) -> str | None:
        self._check()
        member, leader = self._view.member(name), self._view.controller()
        if member is None or member.epoch != self._plan.epoch or member.state not in ("ready", "serving"):
            return None
        # Another controller's epochs have the same numbers, and a worker that it has left behind will end.
        if leader is not None and member.leader not in (None, leader.incarnation):
            return None
        return member.address

    def _controller_address(self) -> str | None:
        self._check()
        controller = self._view.controller()
        return None if controller is None else controller.address

    def _check(self) -> None:
        if self._is_stopping():
            raise StoppedEarly
        if self._view.is_superseded(self._plan):
            raise Superseded
