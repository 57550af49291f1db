"""The controller's first links: to the epoch in which the workers serve by then, whatever came after the first one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from dejavu.clock import Clock
from dejavu.control.journal import RestoreReceipt
from dejavu.control.plan import Plan
from dejavu.errors import DejavuError
from dejavu.ids import FIRST_EPOCH, Epoch, WorkerName
from dejavu.serving.overseer import Overseer
from dejavu.transport.base import TransportError

logger = logging.getLogger(__name__)

_LOOK_S = 0.05

Formed = tuple[Plan, Mapping[WorkerName, str]]
"""A plan whose workers all serve, and where they are."""


def link_first(newest: Callable[[], Formed], overseer: Overseer, clock: Clock, *, timeout_s: float) -> None:
    """The controller is linked to the workers of the newest epoch that has formed.

    A worker may die, or somebody change the declared state, as soon as all have served: then the epoch is over before
    it is linked to, and the next one is waited for. Raises DejavuError when the cluster has failed, or when none could
    be linked to within ``timeout_s``.
    """
    deadline_s = clock.monotonic() + timeout_s
    while True:
        plan, addresses = newest()
        try:
            overseer.link(plan, addresses)
        except TransportError as error:
            logger.warning("epoch %d: %s", plan.epoch, error)
            overseer.suspect(error.peer, plan.epoch, str(error))
            _wait_newer(newest, plan.epoch, overseer, clock, deadline_s, error)
            continue
        if plan.epoch > FIRST_EPOCH:
            # What led here, a repair or a change, is done: there were no rows yet.
            now_s = clock.now()
            overseer.resumed(plan.epoch, RestoreReceipt(restored_s=now_s, resumed_s=now_s))
        return


def _wait_newer(
    newest: Callable[[], Formed], epoch: Epoch, overseer: Overseer, clock: Clock, deadline_s: float, why: TransportError
) -> None:
    while newest()[0].epoch <= epoch:
        if (reason := overseer.why_failed()) is not None:
            raise DejavuError(reason)
        if clock.monotonic() >= deadline_s:
            raise why
        clock.sleep(_LOOK_S)
