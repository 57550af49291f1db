"""A process's outgoing links by the peer's name: one connection for each peer, reused for everything."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from dejavu.engine.messages import AnyMessage, encode
from dejavu.ids import Epoch
from dejavu.transport.base import Buffer, Hello, Link, Transport, TransportError

logger = logging.getLogger(__name__)

CONTROLLER = "controller"
"""The controller's name as a peer."""


class Peers:
    """Links that are up, of one epoch.

    ``on_failed(peer, reason, epoch)`` is called on the transport's thread when a send has failed.
    """

    def __init__(
        self, transport: Transport, hello: Hello, *, timeout_s: float, on_failed: Callable[[str, str, Epoch], None]
    ) -> None:
        self._transport = transport
        self._hello = hello
        self._timeout_s = timeout_s
        self._on_failed = on_failed
        self._links: dict[str, Link] = {}
        self._is_aborted = False
        self._lock = threading.Lock()  # links are made on one thread and may be aborted on another
        self._sent_bytes: Counter[str] = Counter()
        self._sent_lock = threading.Lock()
        self._held: list[tuple[str, bytes, Sequence[Buffer], Future[None]]] | None = None

    def connect(self, name: str, address: str, *, timeout_s: float) -> None:
        """A link to ``name`` is up; the log says by which transport. Raises TransportError, LinkRefused.

        A link that comes up after ``abort`` is aborted too (TransportError).
        """
        link = self._transport.connect(address, self._hello, peer=name, timeout_s=timeout_s)
        with self._lock:
            is_late = self._is_aborted
            if not is_late:
                self._links[name] = link
        if is_late:
            link.abort()
            raise TransportError("the links of this epoch were aborted", peer=name, phase="connect")
        logger.info("link to %s at %s: %s", name, address, link.description)

    @property
    def hello(self) -> Hello:
        """What this process says of itself."""
        return self._hello

    @property
    def names(self) -> tuple[str, ...]:
        """Connected peers."""
        with self._lock:
            return tuple(self._links)

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes that were given to each peer's link so far, headers included. Any thread."""
        with self._sent_lock:
            return dict(self._sent_bytes)

    def send(self, owner: str, header: bytes, payload: Sequence[Buffer] = ()) -> Future[None]:
        """Queues raw bytes for ``owner`` (the ``Sender`` of DejaVuLib). Any thread; never blocks.

        The future fails with TransportError when there is no link, or when it fails.
        """
        held = self._held
        if held is not None:
            waiting: Future[None] = Future()
            held.append((owner, header, payload, waiting))
            return waiting
        link = self._links.get(owner)
        if link is None:
            missing: Future[None] = Future()
            missing.set_exception(TransportError("no link is up", peer=owner, phase="send"))
            return missing
        with self._sent_lock:
            self._sent_bytes[owner] += len(header) + sum(buffer.nbytes for buffer in payload)
        return link.send(header, payload, timeout_s=self._timeout_s)

    def tell(self, owner: str, message: AnyMessage, payload: Sequence[Buffer] = ()) -> Future[None]:
        """Queues a control message; a failure is reported to ``on_failed`` as well."""
        future = self.send(owner, encode(message), payload)
        future.add_done_callback(lambda done: self._check(owner, done))
        return future

    def hold(self, is_held: bool) -> None:
        """While held, messages wait; then they go in their order. For injected partitions. Any thread."""
        held, self._held = self._held, [] if is_held else None
        for owner, header, payload, waiting in held or ():
            self.send(owner, header, payload).add_done_callback(partial(_pass_on, waiting))

    def abort(self) -> None:
        """The links are gone now, and sends that were under way have failed."""
        with self._lock:
            self._is_aborted = True
        for _, link in self._taken():
            link.abort()

    def close(self, timeout_s: float) -> None:
        """What was sent has been received; links are gone. A peer that is gone already is only logged."""
        for name, link in self._taken():
            try:
                link.close(timeout_s)
            except TransportError as error:
                logger.debug("closing the link to %s: %s", name, error)

    def _taken(self) -> list[tuple[str, Link]]:
        with self._lock:
            taken = list(self._links.items())
            self._links.clear()
        return taken

    def _check(self, owner: str, done: Future[None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            self._on_failed(owner, str(error), Epoch(self._hello.epoch))


def _pass_on(waiting: Future[None], done: Future[None]) -> None:
    error = done.exception()
    if error is None:
        waiting.set_result(None)
    else:
        waiting.set_exception(error)
