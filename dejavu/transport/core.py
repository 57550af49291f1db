"""What the link protocol needs from a network library: byte buffers moved under tags, on one thread.

The protocol (``outbound.py``, ``inbound.py``, ``engine.py``) is written once over this interface; UCXX, UCX-Py and
memory (``local.py``) each fit it with a small core. Except for ``submit``, ``call`` and ``stop``, everything here is
called on the core's own thread, and every callback comes on that thread, never from inside the call that caused it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeVar

from dejavu.transport.base import Buffer

Result = TypeVar("Result")
Job: TypeAlias = Callable[[], None]
Cancel: TypeAlias = Callable[[], None]


class CoreError(Exception):
    """The network library's reason why an operation failed, in words."""


Done: TypeAlias = Callable[[CoreError | None], None]
"""Told once that an operation has ended and its buffer is untouched from now on; None means it succeeded."""


class CoreEndpoint(Protocol):
    """One side of a connection. Tags (32 bit) are private to the connection and to the direction."""

    @property
    def description(self) -> str:
        """The transport and interface in use, as far as the library tells; meaningful once opened."""

    def open(self, opened: Done, closed: Callable[[str], None]) -> None:
        """Begins; ``send`` and ``recv`` may be used after ``opened(None)``. ``closed`` is told of the peer's end."""

    def send(self, tag: int, buffer: Buffer, done: Done) -> None:
        """Sends a non-empty buffer, zero-copy where the library can."""

    def recv(self, tag: int, buffer: Buffer, done: Done) -> None:
        """Fills a buffer, which may be larger than what arrives."""

    def abort(self) -> None:
        """The connection is gone and no buffer of it is touched afterwards. Idempotent."""


class Core(Protocol):
    """One thread that owns the network library."""

    @property
    def name(self) -> str:
        """For logs, e.g. ``ucxx``."""

    def submit(self, job: Job) -> bool:
        """Runs the job on the core's thread, soon and in order. Any thread; False and nothing after ``stop``."""

    def call(self, job: Callable[[], Result], timeout_s: float) -> Result:
        """Runs the job on the core's thread and returns its result. Any thread; raises TimeoutError."""

    def later(self, delay_s: float, job: Job) -> Cancel:
        """Runs the job after a delay, unless cancelled."""

    def on_own_thread(self) -> bool:
        """True for a caller that must not wait for this core."""

    def endpoint(self, host: str, port: int) -> CoreEndpoint:
        """An unopened way to a listener."""

    def listen(self, port: int, accepted: Callable[[CoreEndpoint], None]) -> int:
        """Unopened endpoints of whoever connects go to ``accepted``. Returns the port. Raises CoreError."""

    def stop(self) -> None:
        """The port is free and the thread is gone. Any thread but its own; idempotent."""
