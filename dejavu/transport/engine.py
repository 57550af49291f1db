"""The transport over any core: it connects, listens, and closes everything that it has opened."""

from __future__ import annotations

import logging
import os
import socket
import time
from concurrent.futures import wait

from dejavu.errors import Fatal
from dejavu.transport.base import Handler, Hello, LinkRefused, TransportError
from dejavu.transport.buffer_pool import BufferPool
from dejavu.transport.core import Core, CoreEndpoint, CoreError
from dejavu.transport.credits import CreditLimit
from dejavu.transport.inbound import InboundLink, ListenerTerms
from dejavu.transport.outbound import OutboundLink

logger = logging.getLogger(__name__)

DEFAULT_CREDITS = CreditLimit(messages=64, num_bytes=128 * 1024 * 1024)
"""Two messages of 64 MiB on their way keep a link busy."""
_IDLE_BUFFER_BYTES = 256 * 1024 * 1024
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
_LISTEN_TIMEOUT_S = 10.0


class LinkTransport:
    """A ``Transport``: the link protocol over a core. Not usable in a process forked from the one that made it."""

    def __init__(
        self,
        core: Core,
        secret: str,
        *,
        credit_limit: CreditLimit = DEFAULT_CREDITS,
        handshake_timeout_s: float = 5.0,
        idle_buffer_bytes: int = _IDLE_BUFFER_BYTES,
    ) -> None:
        self._core = core
        self._secret = secret
        self._credit_limit = credit_limit
        self._handshake_timeout_s = handshake_timeout_s
        self._pool = BufferPool(idle_buffer_bytes)
        self._process_id = os.getpid()
        self._address: str | None = None
        self._outbound: list[OutboundLink] = []
        self._inbound: list[InboundLink] = []
        self._closed = False

    @property
    def address(self) -> str:
        """See ``Transport.address``."""
        if self._address is None:
            raise RuntimeError("a transport has an address after listen()")
        return self._address

    def listen(self, handler: Handler, *, host: str = "127.0.0.1", port: int = 0) -> str:
        """See ``Transport.listen``. ``host`` is published, not bound: UCX binds every interface.

        Raises TransportError when the port is taken.
        """
        self._check_usable()
        if self._address is not None:
            raise RuntimeError(f"already listening at {self._address}")
        terms = ListenerTerms(
            handler=handler,
            secret=self._secret,
            credit_limit=self._credit_limit,
            handshake_timeout_s=self._handshake_timeout_s,
        )
        try:
            bound = self._core.call(
                lambda: self._core.listen(port, lambda endpoint: self._accept(endpoint, terms)), _LISTEN_TIMEOUT_S
            )
        except CoreError as error:
            raise TransportError(str(error), peer="listener", address=f"{host}:{port}", phase="listen") from error
        self._address = f"{host}:{bound}"
        logger.info("%s listens at %s", self._core.name, self._address)
        return self._address

    def connect(self, address: str, hello: Hello, *, peer: str, timeout_s: float = 10.0) -> OutboundLink:
        """See ``Transport.connect``."""
        self._check_process()
        if self._core.on_own_thread():
            raise RuntimeError("Transport.connect waits for the peer, which the transport's own thread must not")
        deadline_s = time.monotonic() + timeout_s
        host, port = _resolve(address, peer)
        pause_s = _FIRST_PAUSE_S
        while True:
            self._check_usable()
            link = self._link(host, port, hello, peer=peer, address=address)
            try:
                return self._opened(link, deadline_s - time.monotonic())
            except LinkRefused:
                raise
            except TransportError as error:
                if time.monotonic() + pause_s >= deadline_s:
                    raise
                logger.debug("retrying in %s s: %s", pause_s, error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def close(self, timeout_s: float = 5.0) -> None:
        """See ``Transport.close``. A link that cannot be flushed in time is logged and dropped."""
        self._check_process()
        if self._closed:
            return
        links = self._core.call(self._begin_close, timeout_s)
        wait([link.ended for link in links], timeout_s)
        for link in links:
            if not link.ended.done():
                logger.warning("link to %s at %s dropped: not flushed within %s s", link.peer, link.address, timeout_s)
                link.abort()
        self._core.call(self._end_inbound, timeout_s)
        self._core.stop()
        self._address = None

    def _link(self, host: str, port: int, hello: Hello, *, peer: str, address: str) -> OutboundLink:
        return OutboundLink(
            self._core,
            self._core.endpoint(host, port),
            hello=hello,
            secret=self._secret,
            peer=peer,
            address=address,
            check_process=self._check_process,
        )

    def _opened(self, link: OutboundLink, timeout_s: float) -> OutboundLink:
        if not self._core.submit(lambda: self._start(link, timeout_s)):
            raise RuntimeError("the transport is closed")
        link.opened.result()
        return link

    def _start(self, link: OutboundLink, timeout_s: float) -> None:
        self._outbound = [known for known in self._outbound if known.alive]
        self._outbound.append(link)
        if self._closed:
            link.abort()
            return
        link.start(timeout_s)

    def _accept(self, endpoint: CoreEndpoint, terms: ListenerTerms) -> None:
        link = InboundLink(self._core, endpoint, self._pool, terms, ended=self._inbound_ended)
        self._inbound.append(link)
        link.start()

    def _inbound_ended(self, link: InboundLink) -> None:
        self._inbound.remove(link)

    def _begin_close(self) -> tuple[OutboundLink, ...]:
        self._closed = True
        links = tuple(link for link in self._outbound if link.alive)
        for link in links:
            link.begin_close()
        return links

    def _end_inbound(self) -> None:
        for link in tuple(self._inbound):
            link.end("this side has closed its transport")

    def _check_usable(self) -> None:
        self._check_process()
        if self._closed:
            raise RuntimeError("the transport is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise Fatal(
                f"the transport of process {self._process_id} was used in process {os.getpid()}: "
                "a network library does not survive fork(); start processes with spawn"
            )


def _resolve(address: str, peer: str) -> tuple[str, int]:
    """The IPv4 address and port behind ``host:port``. Raises TransportError."""
    host, separator, port = address.rpartition(":")
    try:
        if not separator:
            raise ValueError("no port in it")
        found = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
    except (ValueError, OSError) as error:
        raise TransportError(f"not a usable host:port: {error}", peer=peer, address=address, phase="connect") from error
    return str(found[0][4][0]), int(port)
