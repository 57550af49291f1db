"""A process's outgoing links by the peer's name: one connection for each peer, reused for everything."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from dejavu.engine.messages import AnyMessage, encode
from dejavu.transport.base import Buffer, Hello, Link, Transport, TransportError

logger = logging.getLogger(__name__)

CONTROLLER = "controller"
"""The controller's name as a peer."""


class Peers:
    """Links that are up. ``on_failed(peer, reason)`` is called on the transport's thread when a send has failed."""

    def __init__(
        self, transport: Transport, hello: Hello, *, timeout_s: float, on_failed: Callable[[str, str], None]
    ) -> None:
        self._transport = transport
        self._hello = hello
        self._timeout_s = timeout_s
        self._on_failed = on_failed
        self._links: dict[str, Link] = {}

    def connect(self, name: str, address: str, *, timeout_s: float) -> None:
        """A link to ``name`` is up; the log says by which transport. Raises TransportError, LinkRefused."""
        link = self._transport.connect(address, self._hello, peer=name, timeout_s=timeout_s)
        self._links[name] = link
        logger.info("link to %s at %s: %s", name, address, link.description)

    @property
    def names(self) -> tuple[str, ...]:
        """Connected peers."""
        return tuple(self._links)

    def send(self, owner: str, header: bytes, payload: Sequence[Buffer] = ()) -> Future[None]:
        """Queues raw bytes for ``owner`` (the ``Sender`` of DejaVuLib). Any thread; never blocks.

        The future fails with TransportError when there is no link, or when it fails.
        """
        link = self._links.get(owner)
        if link is None:
            missing: Future[None] = Future()
            missing.set_exception(TransportError("no link is up", peer=owner, phase="send"))
            return missing
        return link.send(header, payload, timeout_s=self._timeout_s)

    def tell(self, owner: str, message: AnyMessage, payload: Sequence[Buffer] = ()) -> Future[None]:
        """Queues a control message; a failure is reported to ``on_failed`` as well."""
        future = self.send(owner, encode(message), payload)
        future.add_done_callback(lambda done: self._check(owner, done))
        return future

    def close(self, timeout_s: float) -> None:
        """What was sent has been received; links are gone. A peer that is gone already is only logged."""
        for name, link in self._links.items():
            try:
                link.close(timeout_s)
            except TransportError as error:
                logger.debug("closing the link to %s: %s", name, error)
        self._links.clear()

    def _check(self, owner: str, done: Future[None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            self._on_failed(owner, str(error))
