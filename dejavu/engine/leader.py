"""Whether the controller that a worker serves still leads: one that no launcher owns ends with its cluster."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from dejavu.engine.cluster_view import ClusterView

logger = logging.getLogger(__name__)

_LOOK_S = 0.5


class LeaderWatch:
    """A thread that calls ``on_gone`` once: when another controller leads, or none for three leases and 5 s.

    So patient an operator is, too, with a store that was wiped or restarted. The store's own outages do not count: what
    it said last still holds. Nor does it count that the controller has lost its way to the store (``is_led``).

    Args:
        is_led: whether a link from a controller is up here.
    """

    def __init__(
        self, view: ClusterView, on_gone: Callable[[], None], is_led: Callable[[], bool], *, lease_ttl_s: float
    ) -> None:
        self._view = view
        self._on_gone = on_gone
        self._is_led = is_led
        self._grace_s = 3.0 * lease_ttl_s + 5.0
        self._thread = threading.Thread(target=self._watch, name="leader-watch", daemon=True)

    def start(self) -> None:
        """The thread runs for as long as the process."""
        self._thread.start()

    def _watch(self) -> None:
        first: str | None = None
        missed_s = 0.0
        while True:
            time.sleep(_LOOK_S)
            entry = self._view.controller()
            if entry is None:
                missed_s = 0.0 if self._is_led() else missed_s + _LOOK_S
                if missed_s < self._grace_s:
                    continue
                logger.info("nobody has led the cluster for %g s: ending", missed_s)
            elif first in (None, entry.incarnation):
                first, missed_s = entry.incarnation, 0.0
                continue
            else:
                logger.info("another controller leads the cluster: ending")
            self._on_gone()
            return
