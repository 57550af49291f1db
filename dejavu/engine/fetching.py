"""KV that came corrupt is asked for again, a bounded number of times for each row."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dejavu.engine import messages as m
from dejavu.engine.peers import Peers
from dejavu.ids import Epoch, RowId
from dejavu.kv.chunk import ChunkHeader

logger = logging.getLogger(__name__)

MOST_FETCHES = 3
"""So often chunks of one row are asked for; then it is computed again (or its copy stays incomplete)."""


class FetchAgain:
    """Main thread only. Knows how often each row was asked for."""

    def __init__(self, peers: Peers, epoch: Epoch) -> None:
        self._peers = peers
        self._epoch = epoch
        self._tries: dict[RowId, int] = {}
        self.num_asked = 0

    def ask(self, peer: str, chunks: Sequence[ChunkHeader]) -> tuple[RowId, ...]:
        """``peer`` is asked for the chunks. Returns the rows that were asked for too often already."""
        row_ids = tuple(dict.fromkeys(chunk.row_id for chunk in chunks))
        spent = tuple(row_id for row_id in row_ids if self._tries.get(row_id, 0) >= MOST_FETCHES)
        self._tries.update({row_id: self._tries.get(row_id, 0) + 1 for row_id in row_ids if row_id not in spent})
        parts = [m.KvPart(chunk.row_id, chunk.layers, chunk.positions) for chunk in chunks if chunk.row_id not in spent]
        if parts:
            self.num_asked += len(parts)
            logger.warning("asking %s again for KV of rows %s", peer, sorted({part.row_id for part in parts}))
            self._peers.tell(peer, m.SendAgain(epoch=self._epoch, parts=tuple(parts)))
        return spent

    def forget(self, row_ids: Sequence[RowId]) -> None:
        """The rows have ended."""
        for row_id in row_ids:
            self._tries.pop(row_id, None)
