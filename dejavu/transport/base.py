"""The transport contract. Every transport passes tests/*/test_transport_contract.py unchanged.

A *link* carries messages one way, from the side that connected to the side that listens; answers go over a link
of their own, so there is one connection for each pair of peers and direction, and it is reused for everything.

- A message is a small ``header`` (at most ``MAX_HEADER_BYTES``) and an optional ``payload`` (0 B to > 1 GiB).
- Order: messages of one link are received in the order in which they were sent.
- Completion: the future of ``send`` resolves when the caller may reuse or free its buffers. It says nothing
  about delivery. It fails with ``TransportError`` when the peer is gone or the deadline has passed; after a
  failure the link is dead (aborted before its buffers are given back), and the caller connects anew.
- Flow control: a link has credits. At most ``credit_messages`` messages and about ``credit_bytes`` bytes are on
  their way un-released; ``send`` queues beyond that, and its deadline still counts. Credits come back when the
  receiver calls ``Inbound.release()``.
- ``close`` flushes: it returns when the peer has received (not necessarily released) everything that was sent,
  or raises at the deadline. ``abort`` drops at once.
- Authentication: a listener trusts nobody. The connecting side proves the cluster's secret (HMAC over a nonce
  from the listener) with its first message, a ``Hello``; ``Handler.admit`` may refuse it with a reason, which
  the connecting side gets in its ``LinkRefused``. Anything else is aborted within ``handshake_timeout_s``.
- Every wait has a deadline. Every error names peer, address and phase.
- Nothing but the transport's own thread touches the network library; handler calls come on that thread and
  must return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeAlias

import msgspec

from dejavu.errors import Retryable

MAX_HEADER_BYTES = 64 * 1024

Buffer: TypeAlias = memoryview
"""A C-contiguous uint8 memoryview (``tensor.view(torch.uint8).reshape(-1).numpy().data``)."""


class TransportError(Retryable):
    """A transfer failed. The message names peer, address and phase (connect, handshake, send, receive, close)."""

    def __init__(self, message: str, *, peer: str = "?", address: str = "?", phase: str = "?") -> None:
        super().__init__(f"{phase} {peer} at {address}: {message}")
        self.peer = peer
        self.address = address
        self.phase = phase


class LinkRefused(TransportError):
    """The listener refused the Hello; the message carries its reason."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Who connects. The proof of the secret travels beside it and is checked by the transport itself."""

    cluster: str
    name: str
    incarnation: str
    epoch: int
    fingerprint: str = ""
    """``KvLayout.fingerprint`` of the connecting side; empty for a peer that holds no KV."""


class Inbound:
    """A received message. ``release`` gives its credits back; the payload may not be used after it."""

    __slots__ = ("_release", "header", "hello", "payload")

    def __init__(self, *, hello: Hello, header: bytes, payload: Buffer, release: Callable[[], None]) -> None:
        self.hello = hello
        self.header = header
        self.payload = payload
        self._release = release

    def release(self) -> None:
        """The message is dealt with. Any thread; idempotent."""
        self._release()


class Handler(Protocol):
    """What a listener calls, on the transport's thread."""

    def admit(self, hello: Hello) -> str | None:
        """None to accept the authenticated peer, or the reason to refuse it."""

    def received(self, message: Inbound) -> None:
        """A message arrived whole."""

    def lost(self, hello: Hello, reason: str) -> None:
        """An admitted inbound link has ended (closed, crashed or aborted: they look alike)."""


class Link(Protocol):
    """An outgoing connection to one peer."""

    @property
    def peer(self) -> str:
        """The peer's name."""

    @property
    def address(self) -> str:
        """``host:port``."""

    @property
    def description(self) -> str:
        """The transport and interface that were really chosen, for the start-up log (e.g. ``ucx tcp/lo``)."""

    @property
    def alive(self) -> bool:
        """False once the link has failed, closed or aborted."""

    def send(self, header: bytes, payload: Sequence[Buffer] = (), *, timeout_s: float = 60.0) -> Future[None]:
        """Queues one message; its payload is the concatenation of the buffers. Any thread; never blocks."""

    def close(self, timeout_s: float = 10.0) -> None:
        """Everything sent has been received, then the link is gone. Raises TransportError at the deadline."""

    def abort(self) -> None:
        """The link is gone now; pending sends fail; no buffer of theirs is touched afterwards."""


class Transport(Protocol):
    """A process's way to its peers; owns one thread and, when listening, one address."""

    @property
    def address(self) -> str:
        """``host:port`` to publish. Raises RuntimeError before ``listen``."""

    def listen(self, handler: Handler, *, host: str = "127.0.0.1", port: int = 0) -> str:
        """Messages of admitted peers go to ``handler``. Returns ``host:port`` to publish."""

    def connect(self, address: str, hello: Hello, *, peer: str, timeout_s: float = 10.0) -> Link:
        """A link on which the peer has accepted our Hello. Blocks; retries refused connections until the deadline.

        Raises LinkRefused with the listener's reason, TransportError otherwise.
        """

    def close(self, timeout_s: float = 5.0) -> None:
        """Links are closed (flushed), the thread is gone, the port is free. Idempotent."""


TransportFactory: TypeAlias = Callable[[str], Transport]
"""Makes a transport from the cluster's secret."""
