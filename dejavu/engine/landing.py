"""The landing thread of a token stage: takes KV messages, has them verified, and says which rows are whole."""

from __future__ import annotations

import logging
import threading

from dejavu.engine.mailbox import Mailbox, RowsLanded, RowsSpoilt
from dejavu.errors import DejavuError
from dejavu.kv.chunk import decode_message
from dejavu.kv.inbox import KvInbox
from dejavu.transport.base import Inbound

logger = logging.getLogger(__name__)


class Landing:
    """One daemon thread between the transport and the inbox. ``close`` ends it."""

    def __init__(self, mailbox: Mailbox, inbox: KvInbox | None) -> None:
        self._mailbox = mailbox
        self._inbox = inbox
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
        if self._inbox is None:
            logger.warning("KV from %s dropped: this stage takes none", inbound.hello.name)
            return
        accepted = self._inbox.accept(decode_message(inbound.header), inbound.payload)
        if accepted.completed:
            self._mailbox.post(RowsLanded(row_ids=accepted.completed))
        if accepted.corrupt:
            reason = f"corrupt KV chunk from {inbound.hello.name}"
            logger.error("%s for rows %s", reason, list(accepted.corrupt))
            self._mailbox.post(RowsSpoilt(row_ids=accepted.corrupt, reason=reason))
