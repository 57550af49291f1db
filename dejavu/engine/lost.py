"""What a worker makes of a link that is gone: it tells the controller, who knows more than one worker does."""

from __future__ import annotations

import logging

from dejavu.engine import messages as m
from dejavu.engine.host import Host
from dejavu.engine.linking import ControllerGone
from dejavu.engine.mailbox import PeerLost
from dejavu.engine.peers import CONTROLLER

logger = logging.getLogger(__name__)


class LostLinks:
    """Main thread only. A peer is reported once an epoch: whether it is dead is for others to find out."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._reported: set[str] = set()
        self._alone_since_s: float | None = None
        self._reason = ""

    def check(self) -> None:
        """Raises ControllerGone when the controller has been gone for too long: nobody says how to go on.

        Not at once, for it leaves an epoch before its workers do.
        """
        now_s, since_s = self._host.clock.monotonic(), self._alone_since_s
        if since_s is not None and now_s - since_s > self._host.plan.timeout_s:
            raise ControllerGone(f"the controller is gone: {self._reason}")

    def note(self, event: PeerLost) -> None:
        """A link is gone."""
        if event.peer == CONTROLLER:
            if self._alone_since_s is None:
                self._alone_since_s, self._reason = self._host.clock.monotonic(), event.reason
            return
        if event.peer in self._reported:
            return
        self._reported.add(event.peer)
        logger.warning("peer %s is gone: %s", event.peer, event.reason)
        message = m.LinkLost(epoch=self._host.plan.epoch, peer=event.peer, reason=event.reason)
        self._host.tell(CONTROLLER, message)
