"""What a worker makes of a link that is gone: it tells the controller, who knows more than one worker does."""

from __future__ import annotations

import logging

from dejavu.engine import messages as m
from dejavu.engine.host import Host
from dejavu.engine.mailbox import PeerLost
from dejavu.engine.peers import CONTROLLER
from dejavu.errors import Fatal

logger = logging.getLogger(__name__)


class LostLinks:
    """Main thread only. A peer is reported once an epoch: whether it is dead is for others to find out."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._reported: set[str] = set()

    def note(self, event: PeerLost) -> None:
        """A link is gone. Raises Fatal when it is the controller's: nobody would say how to go on."""
        if event.peer == CONTROLLER:
            raise Fatal(f"the controller is gone: {event.reason}")
        if event.peer in self._reported:
            return
        self._reported.add(event.peer)
        logger.warning("peer %s is gone: %s", event.peer, event.reason)
        message = m.LinkLost(epoch=self._host.plan.epoch, peer=event.peer, reason=event.reason)
        self._host.tell(CONTROLLER, message)
