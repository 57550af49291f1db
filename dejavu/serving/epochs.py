"""The controller's way from one epoch into the next: links down, links up, rows restored, the first token after it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from dejavu.control.admission import Admission
from dejavu.control.journal import RestoreReceipt
from dejavu.engine import messages as m
from dejavu.engine.mailbox import ClusterFenced, ClusterFormed
from dejavu.ids import RowId
from dejavu.serving.cluster_links import ClusterInterrupted, ClusterLinks, NoAnswer
from dejavu.serving.overseer import Overseer, Watcher
from dejavu.serving.restorer import Restorer
from dejavu.serving.tracking import Tracked
from dejavu.transport.base import TransportError

logger = logging.getLogger(__name__)


class Epochs:
    """On the controller's thread."""

    def __init__(self, links: ClusterLinks, overseer: Overseer, watcher: Watcher) -> None:
        self._links = links
        self._overseer = overseer
        self._watcher = watcher
        self._is_between = False
        self._is_changing = False
        self._restoring: set[RowId] = set()
        self._receipt: RestoreReceipt | None = None
        self._last_token_s: float | None = None
        self._is_repaired = True
        self.is_another_repair = True
        """Whether the epoch that was entered last began another repair: the one before had been finished."""

    @property
    def is_between(self) -> bool:
        """True while no epoch's workers can be told anything."""
        return self._is_between

    @property
    def is_changing(self) -> bool:
        """Whether what leads into the next epoch is a change of the declared state, and no repair."""
        return self._is_between and self._is_changing

    def fence(self, event: ClusterFenced) -> None:
        """Nothing is sent any more until the plan's workers all serve."""
        if event.plan.epoch <= self._links.plan.epoch:
            return
        self._is_between = True
        # What ends from now on says nothing of the epoch that is over.
        self._receipt = None
        self._is_changing = event.plan.revision != self._links.plan.revision
        self._watcher.phase("fence")
        self._watcher.phase("replace")

    def enter(self, event: ClusterFormed) -> ClusterLinks | None:
        """Links to the workers of the new epoch, or None when it is no new one or is over already."""
        if event.plan.epoch <= self._links.plan.epoch:
            return None
        former = self._links
        try:
            self._links = self._overseer.link(event.plan, event.addresses)
        except TransportError as error:
            logger.warning("epoch %d: %s", event.plan.epoch, error)
            self._overseer.suspect(error.peer, event.plan.epoch, str(error))
            return None
        # Not before: whoever is still in the old epoch would take the controller for dead.
        former.abort()
        self._is_between = False
        self._watcher.phase("restore")
        return self._links

    def restore(self, admission: Admission, rows: Mapping[RowId, Tracked], steps: Mapping[int, int]) -> bool:
        """Every open row goes on in this epoch; False when it is over already, or a worker of it does not answer."""
        self._receipt, self._restoring = None, set(rows)
        try:
            receipt = Restorer(self._links, admission, rows, steps).run()
        except ClusterInterrupted as error:
            logger.warning("restoring was interrupted: %s", error)
            return False
        except NoAnswer as error:
            logger.warning("restoring failed; another epoch is needed: %s", error)
            self._is_between, self._is_changing = True, False
            for worker in error.workers:
                self._overseer.suspect(worker, self._links.plan.epoch, str(error))
            return False
        self.is_another_repair, self._is_repaired = self._is_repaired, False
        self._receipt = msgspec.structs.replace(receipt, last_token_s=self._last_token_s)
        self._watcher.phase("resume")
        self._finish_if_done()
        return True

    def heard(self) -> None:
        """Tokens have come."""
        self._last_token_s = self._links.clock.now()

    def progressed(self, row_id: RowId) -> None:
        """The row has a token."""
        if self._receipt is not None and self._receipt.resumed_s == self._receipt.restored_s:
            now_s = self._links.clock.now()
            self._receipt = msgspec.structs.replace(self._receipt, resumed_s=now_s)
            self._tell(self._receipt)
        self.ended(row_id)

    def ended(self, row_id: RowId) -> None:
        """The row is not waited for: it has a token, or its request was given up."""
        self._restoring.discard(row_id)
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._receipt is None or self._restoring:
            return
        if self._receipt.resumed_s == self._receipt.restored_s:
            self._tell(self._receipt)
        self._links.every_worker(m.ForgetSources(epoch=self._links.plan.epoch))
        self._receipt = None

    def _tell(self, receipt: RestoreReceipt) -> None:
        self._is_repaired = True
        self._overseer.resumed(self._links.plan.epoch, receipt)
