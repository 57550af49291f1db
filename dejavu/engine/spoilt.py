"""KV that came corrupt, was not sent, or is asked for again: fetched once more, or its rows are computed again."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dejavu.engine import messages as m
from dejavu.engine.fetching import FetchAgain
from dejavu.engine.host import Host
from dejavu.engine.landed import LandedRows
from dejavu.engine.mailbox import ChunksSpoilt
from dejavu.engine.outflow import Outflow
from dejavu.engine.peers import CONTROLLER
from dejavu.ids import RowId

logger = logging.getLogger(__name__)


class SpoiltKv:
    """Main thread only.

    Args:
        landed: rows that arrive by stream; None where none can.
        out: what has left this stage, to be sent again.
    """

    def __init__(self, host: Host, landed: LandedRows | None, out: Outflow) -> None:
        self._host = host
        self._landed = landed
        self._out = out
        self._fetching = FetchAgain(host.peers, host.plan.epoch)

    @property
    def num_asked(self) -> int:
        """Parts that were asked for again."""
        return self._fetching.num_asked

    def rows(self, row_ids: tuple[RowId, ...], reason: str) -> None:
        """The controller knows of the rows that cannot go on; a bad chunk does no harm to a row that is whole."""
        row_ids = row_ids if self._landed is None else self._landed.unproven(row_ids)
        if row_ids:
            failed = m.RowsFailed(epoch=self._host.plan.epoch, row_ids=row_ids, reason=reason)
            self._host.tell(CONTROLLER, failed)

    def chunks(self, event: ChunksSpoilt) -> None:
        """The chunks' sender is asked for them again, or their rows are given up."""
        replicas = self._host.kept.replicas
        copies = [chunk for chunk in event.chunks if replicas.store_for(chunk.layers) is not None]
        wanted = [chunk for chunk in copies if not replicas.has_ended(chunk.row_id)]
        for row_id in self._fetching.ask(event.peer, wanted):
            logger.error("the copy of row %s stays incomplete: its KV came corrupt too often", row_id)
        if self._landed is None:
            return
        own = [chunk for chunk in event.chunks if chunk not in copies]
        unproven = set(self._landed.unproven([chunk.row_id for chunk in own]))
        spent = self._fetching.ask(event.peer, [chunk for chunk in own if chunk.row_id in unproven])
        self.rows(spent, f"corrupt KV from {event.peer}, also when it was sent again")

    def asked_again(self, parts: Sequence[m.KvPart]) -> None:
        """A receiver has its parts once more, or its rows are given up."""
        gone = self._out.send_again(parts)
        self.rows(gone, "its KV was asked for again and is not kept any more")

    def forget(self, row_ids: Sequence[RowId]) -> None:
        """The rows have ended."""
        self._fetching.forget(row_ids)
