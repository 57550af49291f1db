"""The connecting side of a link."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from dejavu.transport.base import Buffer, Hello, LinkRefused, TransportError
from dejavu.transport.core import Cancel, Core, CoreEndpoint, CoreError
from dejavu.transport.credits import CreditLimit, SenderCredits
from dejavu.transport.frame_reader import FrameReader
from dejavu.transport.frames import (
    FRAME_TAG,
    Accept,
    Challenge,
    Close,
    Closed,
    Credit,
    Frame,
    Refuse,
    Want,
    encode,
)
from dejavu.transport.outgoing import Outgoing, TagCounter
from dejavu.transport.proof import ConnectorHandshake, HandshakeError

logger = logging.getLogger(__name__)


class OutboundLink:
    """A ``Link``. Its state belongs to the core's thread; callers only submit to it."""

    def __init__(
        self,
        core: Core,
        endpoint: CoreEndpoint,
        *,
        hello: Hello,
        secret: str,
        peer: str,
        address: str,
        check_process: Callable[[], None],
    ) -> None:
        self._core = core
        self._endpoint = endpoint
        self._handshake = ConnectorHandshake(secret, hello)
        self._peer = peer
        self._address = address
        self._check_process = check_process
        self._reader = FrameReader(endpoint, received=self._frame, failed=self._fail)
        self._credits: SenderCredits | None = None
        self._queued: deque[Outgoing] = deque()
        self._posted: dict[int, Outgoing] = {}
        self._tags = TagCounter()
        self._wants_credit = False
        self._failure: TransportError | None = None
        self._phase = "connect"
        self._close_sent = False
        self._cancel_watch: Cancel | None = None
        self._watched_deadline_s = float("inf")
        self.opened: Future[None] = Future()
        self.ended: Future[None] = Future()

    @property
    def peer(self) -> str:
        """See ``Link.peer``."""
        return self._peer

    @property
    def address(self) -> str:
        """See ``Link.address``."""
        return self._address

    @property
    def description(self) -> str:
        """See ``Link.description``."""
        return self._endpoint.description

    @property
    def alive(self) -> bool:
        """See ``Link.alive``."""
        return self._failure is None

    def send(self, header: bytes, payload: Sequence[Buffer] = (), *, timeout_s: float = 60.0) -> Future[None]:
        """See ``Link.send``. Raises ValueError for a header that is too large or memory with gaps."""
        self._check_process()
        message = Outgoing(header, payload, timeout_s=timeout_s)
        if self._failure is not None or not self._core.submit(lambda: self._enqueue(message)):
            message.future.set_exception(self._gone())
        return message.future

    def close(self, timeout_s: float = 10.0) -> None:
        """See ``Link.close``."""
        self._check_process()
        if self._core.on_own_thread():
            raise RuntimeError("Link.close waits for the peer, which the transport's own thread must not")
        self._core.submit(self.begin_close)
        try:
            self.ended.result(timeout_s)
        except FutureTimeout:
            self._abort(f"not everything was received within {timeout_s} s", phase="close")
            self.ended.result(timeout_s)

    def abort(self) -> None:
        """See ``Link.abort``."""
        self._check_process()
        self._abort("aborted by this side", phase="abort")

    def start(self, timeout_s: float) -> None:
        """Connecting; ``opened`` tells how it ends, by the deadline. On the core's thread."""
        self._cancel_watch = self._core.later(timeout_s, lambda: self._fail(f"no answer within {timeout_s:.3g} s"))
        self._endpoint.open(self._endpoint_opened, self._fail)

    def begin_close(self) -> None:
        """Nothing more is taken; everything queued goes out, then the link ends. On the core's thread."""
        if self._failure is not None or self._phase == "close":
            return
        if self._credits is None:
            self._fail("the transport was closed")
            return
        self._phase = "close"
        self._pump()

    def _endpoint_opened(self, failure: CoreError | None) -> None:
        if self._failure is not None:
            return
        if failure is not None:
            self._fail(str(failure))
            return
        self._phase = "handshake"
        self._reader.start()

    def _frame(self, frame: Frame) -> None:
        match frame:
            case Challenge() | Accept() if self._phase == "handshake":
                self._shake_hands(frame)
            case Refuse():
                self._end(LinkRefused(frame.reason, peer=self._peer, address=self._address, phase="handshake"))
            case Credit() if self._credits is not None:
                self._gain(self._credits, frame)
            case Closed() if self._close_sent:
                self._end(self._error("closed by this side", phase="close"), clean=True)
            case _:
                self._fail(f"unexpected {type(frame).__name__} from the listener")

    def _shake_hands(self, frame: Challenge | Accept) -> None:
        try:
            if isinstance(frame, Challenge):
                self._send_frame(self._handshake.answer(frame))
            else:
                self._accepted(self._handshake.credits(frame))
        except HandshakeError as error:
            self._fail(str(error))

    def _accepted(self, limit: CreditLimit) -> None:
        self._credits = SenderCredits(limit)
        self._phase = "send"
        self._unwatch()
        logger.info("link to %s at %s is up: %s", self._peer, self._address, self._endpoint.description)
        self.opened.set_result(None)

    def _gain(self, credits: SenderCredits, credit: Credit) -> None:
        try:
            credits.gain(credit.messages, credit.num_bytes)
        except ValueError as error:
            self._fail(str(error))
            return
        self._wants_credit = False
        self._pump()

    def _enqueue(self, message: Outgoing) -> None:
        if self._failure is not None or self._phase == "close":
            message.future.set_exception(self._gone())
            return
        self._queued.append(message)
        self._watch(message.deadline_s)
        self._pump()

    def _pump(self) -> None:
        assert self._credits is not None, "links are handed out once they are accepted"
        while self._queued and self._failure is None:
            if not self._credits.fits(self._queued[0].num_bytes):
                self._want_credit()
                return
            message = self._queued.popleft()
            self._credits.spend(message.num_bytes)
            self._post(message)
        if self._phase == "close" and not self._close_sent and self._failure is None:
            self._close_sent = True
            self._send_frame(Close())

    def _want_credit(self) -> None:
        if not self._wants_credit:
            self._wants_credit = True
            self._send_frame(Want())

    def _post(self, message: Outgoing) -> None:
        self._posted[id(message)] = message
        transfers = message.transfers(self._tags)
        message.operations_left = len(transfers)
        for tag, buffer in transfers:
            self._endpoint.send(tag, buffer, lambda failure: self._sent(message, failure))

    def _sent(self, message: Outgoing, failure: CoreError | None) -> None:
        if failure is not None:
            self._fail(str(failure))
            return
        message.operations_left -= 1
        if message.operations_left == 0 and self._posted.pop(id(message), None) is not None:
            message.future.set_result(None)

    def _send_frame(self, frame: Frame) -> None:
        self._endpoint.send(FRAME_TAG, memoryview(encode(frame)), self._frame_sent)

    def _frame_sent(self, failure: CoreError | None) -> None:
        if failure is not None:
            self._fail(str(failure))

    def _abort(self, reason: str, *, phase: str) -> None:
        if self._failure is not None:
            return
        error = self._error(reason, phase=phase)
        self._core.call(lambda: self._end(error), timeout_s=30.0)

    def _watch(self, deadline_s: float) -> None:
        """One timer for all pending messages: most are gone long before it fires."""
        if deadline_s >= self._watched_deadline_s:
            return
        self._unwatch()
        self._watched_deadline_s = deadline_s
        self._cancel_watch = self._core.later(max(0.0, deadline_s - time.monotonic()), self._check_deadlines)

    def _unwatch(self) -> None:
        if self._cancel_watch is not None:
            self._cancel_watch()
        self._cancel_watch = None
        self._watched_deadline_s = float("inf")

    def _check_deadlines(self) -> None:
        self._unwatch()
        earliest_s = min((message.deadline_s for message in self._pending()), default=None)
        if earliest_s is None:
            return
        if earliest_s > time.monotonic():
            self._watch(earliest_s)
            return
        waiting = "the peer gave no credits" if self._wants_credit else "the peer did not take the bytes"
        self._fail(f"a message missed its deadline; {waiting}")

    def _pending(self) -> tuple[Outgoing, ...]:
        return (*self._posted.values(), *self._queued)

    def _gone(self) -> TransportError:
        return self._error(f"the link is gone: {self._failure or 'it is being closed'}", phase="send")

    def _error(self, reason: str, *, phase: str) -> TransportError:
        return TransportError(reason, peer=self._peer, address=self._address, phase=phase)

    def _fail(self, reason: str) -> None:
        self._end(self._error(reason, phase=self._phase))

    def _end(self, error: TransportError, *, clean: bool = False) -> None:
        """The one way out of every state: first the endpoint lets go of the buffers, then their owners hear of it."""
        if self._failure is not None:
            return
        self._failure = error
        self._reader.stop()
        self._unwatch()
        self._endpoint.abort()
        pending = self._pending()
        self._posted.clear()
        self._queued.clear()
        for message in pending:
            message.future.set_exception(error)
        if not self.opened.done():
            self.opened.set_exception(error)
        if clean:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
