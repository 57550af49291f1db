"""What a worker makes of a link that is gone: the end, unless ``Stop`` comes first."""

from __future__ import annotations

import logging

from dejavu.clock import Clock
from dejavu.engine.mailbox import PeerLost
from dejavu.engine.peers import CONTROLLER
from dejavu.errors import Fatal

logger = logging.getLogger(__name__)

_GRACE_S = 3.0
"""How long a peer's link may be gone before ``Stop`` comes: at a clean end, workers part in any order."""


class LostLinks:
    """Main thread only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lost: tuple[float, str] | None = None

    def note(self, event: PeerLost) -> None:
        """A link is gone. Raises Fatal at once when it is the controller's."""
        if event.peer == CONTROLLER:
            raise Fatal(f"the controller is gone: {event.reason}")
        logger.warning("peer %s is gone: %s", event.peer, event.reason)
        self._lost = self._lost or (self._clock.monotonic(), f"the link with {event.peer} is gone: {event.reason}")

    def check(self) -> None:
        """Raises Fatal when a peer's link has been gone for too long."""
        if self._lost is not None and self._clock.monotonic() - self._lost[0] > _GRACE_S:
            raise Fatal(self._lost[1])
