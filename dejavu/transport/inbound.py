"""The listening side of a link."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from dejavu.transport.base import Handler, Hello
from dejavu.transport.buffer_pool import BufferPool
from dejavu.transport.core import Cancel, Core, CoreEndpoint, CoreError
from dejavu.transport.credits import CreditLimit, ReceiverCredits
from dejavu.transport.frame_reader import FrameReader
from dejavu.transport.frames import (
    FRAME_TAG,
    PROTOCOL_VERSION,
    Accept,
    Challenge,
    Close,
    Closed,
    Credit,
    Frame,
    Greeting,
    Head,
    Long,
    Refuse,
    Want,
    encode,
)
from dejavu.transport.incoming import Incoming
from dejavu.transport.proof import accept_proof, greeting_proof, new_nonce, proves

logger = logging.getLogger(__name__)
_LONGEST_LONG_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerTerms:
    """What a listener applies to everyone who connects."""

    handler: Handler
    secret: str
    credit_limit: CreditLimit
    handshake_timeout_s: float


class InboundLink:
    """A connection that somebody made to us. All of it on the core's thread, except the release of messages."""

    def __init__(
        self,
        core: Core,
        endpoint: CoreEndpoint,
        pool: BufferPool,
        terms: ListenerTerms,
        *,
        ended: Callable[[InboundLink], None],
    ) -> None:
        self._core = core
        self._endpoint = endpoint
        self._pool = pool
        self._terms = terms
        self._on_end = ended
        self._reader = FrameReader(endpoint, received=self._frame, failed=self.end)
        self._nonce = new_nonce()
        self._hello: Hello | None = None
        self._credits = ReceiverCredits(terms.credit_limit)
        self._messages: deque[Incoming] = deque()
        self._release_lock = threading.Lock()
        self._cancel_deadline: Cancel | None = None
        self._close_received = False
        self._close_confirmed = False
        self._answered = False
        self._ended = False

    def start(self) -> None:
        """The handshake runs, and ends in time."""
        timeout_s = self._terms.handshake_timeout_s
        self._cancel_deadline = self._core.later(timeout_s, lambda: self.end(f"not admitted within {timeout_s} s"))
        self._endpoint.open(self._endpoint_opened, self.end)

    def end(self, reason: str) -> None:
        """The connection is gone; the handler of an admitted peer has been told. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._reader.stop()
        self._endpoint.abort()
        self._messages.clear()
        self._cancel_timer()
        self._on_end(self)
        if self._hello is None:
            logger.info("an incoming connection ended before it was admitted: %s", reason)
            return
        told = "closed by the peer" if self._close_confirmed else reason
        logger.info("link from %s ended: %s", self._hello.name, told)
        self._terms.handler.lost(self._hello, told)

    def _endpoint_opened(self, failure: CoreError | None) -> None:
        if self._ended:
            return
        if failure is not None:
            self.end(str(failure))
            return
        self._reader.start()
        self._send_frame(Challenge(PROTOCOL_VERSION, self._nonce))

    def _frame(self, frame: Frame) -> None:
        match frame:
            case Greeting() if not self._answered:
                self._answered = True
                self._greet(frame)
            case Head() | Long() if self._hello is not None and not self._close_received:
                self._begin_message(frame)
            case Want() if self._hello is not None:
                self._credits.want()
                self._report_credits()
            case Close() if self._hello is not None:
                self._close_received = True
                self._deliver()
            case _:
                self.end(f"unexpected {type(frame).__name__} from the connecting side")

    def _greet(self, greeting: Greeting) -> None:
        secret = self._terms.secret
        if not proves(greeting_proof(secret, nonce=self._nonce, hello=greeting.hello), greeting.proof):
            self._refuse("the cluster's secret was not proven")
            return
        try:
            hello = msgspec.msgpack.decode(greeting.hello, type=Hello)
        except msgspec.DecodeError as error:
            self._refuse(f"the Hello cannot be read: {error}")
            return
        reason = self._terms.handler.admit(hello)
        if reason is not None:
            self._refuse(reason)
            return
        self._hello = hello
        self._cancel_timer()
        limit = self._terms.credit_limit
        proof = accept_proof(secret, nonce=greeting.nonce, hello=greeting.hello)
        self._send_frame(Accept(proof, limit.messages, limit.num_bytes))
        logger.info("link from %s is up: %s", hello.name, self._endpoint.description)

    def _refuse(self, reason: str) -> None:
        # The connecting side hangs up once it has read why; the handshake's deadline does it otherwise.
        self._send_frame(Refuse(reason[:1000]))

    def _begin_message(self, frame: Head | Long) -> None:
        message = Incoming(self._endpoint, self._pool, hold=self._hold, completed=self._deliver, failed=self.end)
        self._messages.append(message)
        if isinstance(frame, Head):
            message.take_head(frame)
            return
        if frame.num_bytes > _LONGEST_LONG_BYTES:
            self.end(f"a message head of {frame.num_bytes} bytes; at most {_LONGEST_LONG_BYTES}")
            return
        message.take_long(frame)

    def _hold(self, num_bytes: int) -> bool:
        if self._credits.hold(num_bytes):
            return True
        self.end(f"the peer sent {num_bytes} bytes without credits")
        return False

    def _deliver(self) -> None:
        while self._messages and self._messages[0].is_whole and not self._ended:
            self._hand_over(self._messages.popleft())
        if self._close_received and not self._messages and not self._ended:
            self._confirm_close()

    def _hand_over(self, message: Incoming) -> None:
        assert self._hello is not None, "only admitted peers have messages"
        inbound = message.inbound(self._hello, lambda: self._release(message))
        try:
            self._terms.handler.received(inbound)
        except Exception:  # The handler's mistake must not end the thread of all links; this link has lost a message.
            logger.exception("the handler failed on a message of %s; its link is aborted", self._hello.name)
            self.end("the handler failed on a message")

    def _release(self, message: Incoming) -> None:
        with self._release_lock:
            if message.is_released:
                return
            message.is_released = True
        message.recycle()
        self._core.submit(lambda: self._give_back(message.num_bytes))

    def _give_back(self, num_bytes: int) -> None:
        self._credits.release(num_bytes)
        self._report_credits()

    def _report_credits(self) -> None:
        owed = self._credits.report()
        if owed is not None and not self._ended:
            self._send_frame(Credit(*owed))

    def _confirm_close(self) -> None:
        # The peer hangs up once it has the confirmation; the timer does it for a peer that dies in between.
        self._close_confirmed = True
        self._send_frame(Closed())
        self._cancel_timer()
        self._cancel_deadline = self._core.later(self._terms.handshake_timeout_s, lambda: self.end("closed"))

    def _cancel_timer(self) -> None:
        if self._cancel_deadline is not None:
            self._cancel_deadline()
            self._cancel_deadline = None

    def _send_frame(self, frame: Frame) -> None:
        self._endpoint.send(FRAME_TAG, memoryview(encode(frame)), self._frame_sent)

    def _frame_sent(self, failure: CoreError | None) -> None:
        if failure is not None:
            self.end(str(failure))
