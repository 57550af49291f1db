"""The landing thread of a stage: takes KV messages, has them verified, and says which rows are whole."""

from __future__ import annotations

import logging
import threading

from dejavu.engine.mailbox import ChunksSpoilt, Mailbox, RowsLanded
from dejavu.engine.replicas import Replicas
from dejavu.errors import DejavuError
from dejavu.kv.accepted import Accepted
from dejavu.kv.chunk import KvMessage, decode_message
from dejavu.kv.inbox import KvInbox
from dejavu.transport.base import Inbound

logger = logging.getLogger(__name__)


class Landing:
    """One daemon thread between the transport and where KV lands. ``close`` ends it.

    Args:
        inbox: for rows of this stage's own layers; None where none come.
        replicas: for copies of other stages' rows.
    """

    def __init__(self, mailbox: Mailbox, inbox: KvInbox | None, replicas: Replicas) -> None:
        self._mailbox = mailbox
        self._inbox = inbox
        self._replicas = replicas
        self._thread = threading.Thread(target=self._run, name="kv-landing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What had arrived has landed, and the thread has ended."""
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
        accepted = self._accept(decode_message(inbound.header), inbound)
        if accepted.completed:
            self._mailbox.post(RowsLanded(row_ids=accepted.completed))
        if accepted.corrupt_chunks:
            self._mailbox.post(ChunksSpoilt(peer=inbound.hello.name, chunks=accepted.corrupt_chunks))

    def _accept(self, message: KvMessage, inbound: Inbound) -> Accepted:
        """By its layers, a message is for the pool or a copy: one worker is both source and successor of another."""
        store = self._replicas.store_for(message.chunks[0].layers) if message.chunks else None
        if store is not None:
            accepted = store.accept(message, inbound.payload)
            if not accepted.corrupt_chunks:
                self._replicas.acknowledge(store, message)
            return accepted
        if self._inbox is not None:
            return self._inbox.accept(message, inbound.payload)
        logger.warning("KV from %s dropped: this stage takes none", inbound.hello.name)
        return Accepted(dropped=len(message.chunks))
