"""Faults that somebody injects into a worker on purpose: it is cut off from everybody, or becomes slow."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

import msgspec

from dejavu.engine.cluster_view import ClusterView
from dejavu.engine.mailbox import Mailbox
from dejavu.engine.peers import Peers
from dejavu.store.lease import LeaseKeeper

logger = logging.getLogger(__name__)


class FaultLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line on a worker's standard input."""

    partition_s: float | None = None
    """Cut off from peers, controller and store for so long; then what was held back goes on its way."""
    slow_s: float | None = None
    """Added before every piece of work; 0: as fast as ever."""


class Slowed(Protocol):
    """What can be made slow."""

    slow_s: float


class InjectedFaults:
    """Any thread."""

    def __init__(self, mailbox: Mailbox, view: ClusterView, keeper: LeaseKeeper) -> None:
        self._mailbox = mailbox
        self._view = view
        self._keeper = keeper
        self._peers: Peers | None = None
        self._slowed: Slowed | None = None
        self._slow_s = 0.0
        self._is_cut = False
        self._timer: threading.Timer | None = None

    def slows(self, slowed: Slowed) -> None:
        """Who is made slow from now on."""
        self._slowed = slowed
        slowed.slow_s = self._slow_s

    def cuts(self, peers: Peers) -> None:
        """Whose links are cut from now on."""
        self._peers = peers
        peers.hold(self._is_cut)

    def obey(self, line: bytes) -> None:
        """The fault has begun; an unreadable line is logged."""
        try:
            fault = msgspec.json.decode(line, type=FaultLine)
        except msgspec.DecodeError as error:
            logger.error("a line on standard input is no fault: %s", error)
            return
        if fault.slow_s is not None:
            logger.warning("fault: slow by %g s", fault.slow_s)
            self._slow_s = fault.slow_s
            if self._slowed is not None:
                self._slowed.slow_s = fault.slow_s
        if fault.partition_s is not None:
            logger.warning("fault: cut off for %g s", fault.partition_s)
            self._cut(True)
            self._timer = threading.Timer(fault.partition_s, self._cut, (False,))
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Nothing is held back any more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._is_cut:
            self._cut(False)

    def _cut(self, is_cut: bool) -> None:
        self._is_cut = is_cut
        self._keeper.cut(is_cut)
        self._mailbox.hold(is_cut)
        if self._peers is not None:
            self._peers.hold(is_cut)
        self._view.be_blind(is_cut)
        if not is_cut:
            logger.warning("fault: the way is free again")
