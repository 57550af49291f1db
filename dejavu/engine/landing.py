"""The landing thread of a stage: takes KV messages, has them verified, and says which rows are whole."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from dejavu.engine.mailbox import ChunksSpoilt, Mailbox, RowsLanded
from dejavu.errors import DejavuError
from dejavu.kv.accepted import Accepted
from dejavu.kv.chunk import KvMessage, decode_message
from dejavu.transport.base import Inbound

logger = logging.getLogger(__name__)


class KvSink(Protocol):
    """Where KV lands: a ``KvInbox`` or a ``ReplicaStore``."""

    def accept(self, message: KvMessage, payload: memoryview) -> Accepted:
        """Every chunk has landed or was dropped and counted."""


class Landing:
    """One daemon thread between the transport and a sink of KV. ``close`` ends it."""

    def __init__(self, mailbox: Mailbox, sink: KvSink | None) -> None:
        self._mailbox = mailbox
        self._sink = sink
        self._thread = threading.Thread(target=self._run, name="kv-landing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The thread has ended."""
        self._mailbox.kv.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while (inbound := self._mailbox.kv.get()) is not None:
            try:
                self._land(inbound)
            except (DejavuError, ValueError) as error:
                logger.error("KV message from %s dropped: %s", inbound.hello.name, error)
            finally:
                inbound.release()

    def _land(self, inbound: Inbound) -> None:
        if self._sink is None:
            logger.warning("KV from %s dropped: this stage takes none", inbound.hello.name)
            return
        accepted = self._sink.accept(decode_message(inbound.header), inbound.payload)
        if accepted.completed:
            self._mailbox.post(RowsLanded(row_ids=accepted.completed))
        if accepted.corrupt_chunks:
            self._mailbox.post(ChunksSpoilt(peer=inbound.hello.name, chunks=accepted.corrupt_chunks))
