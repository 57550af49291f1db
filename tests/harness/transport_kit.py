"""What the transport tests share: a handler to wait on, and transports that are closed and checked at the end."""

from __future__ import annotations

import gc
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dejavu.transport.base import Hello, Inbound
from dejavu.transport.credits import CreditLimit
from dejavu.transport.engine import DEFAULT_CREDITS, LinkTransport
from dejavu.transport.local import LocalNetwork, LocalTransport

from harness.ucp_stand_in import install

SECRET = "a secret of these tests"
WAIT_S = 30.0
TransportMaker = Callable[[str, CreditLimit, float], LinkTransport]


def transport_maker(kind: str, monkeypatch: pytest.MonkeyPatch) -> TransportMaker:
    """Makes transports of one kind that reach each other: ``local``, ``ucp-stand-in`` or ``ucx``."""
    if kind == "local":
        network = LocalNetwork()
        return lambda secret, credits, handshake_s: LocalTransport(
            network, secret, credit_limit=credits, handshake_timeout_s=handshake_s
        )
    if kind == "ucx":
        from dejavu.transport.ucx import UcxTransport

        return lambda secret, credits, handshake_s: UcxTransport(
            secret, credit_limit=credits, handshake_timeout_s=handshake_s
        )
    install(monkeypatch)
    from dejavu.transport.ucp_worker import UcpCore

    return lambda secret, credits, handshake_s: LinkTransport(
        UcpCore(), secret, credit_limit=credits, handshake_timeout_s=handshake_s
    )


def noise(num_bytes: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random bytes, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def hello(name: str = "w0", *, epoch: int = 1) -> Hello:
    """A peer's introduction."""
    return Hello(cluster="c", name=name, incarnation="i", epoch=epoch)


class Inbox:
    """A handler that keeps what comes, and refuses every epoch but 1."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Inbound] = queue.Queue()
        self.losses: queue.Queue[tuple[str, str]] = queue.Queue()

    def admit(self, hello: Hello) -> str | None:
        return None if hello.epoch == 1 else f"epoch {hello.epoch} is stale, the plan is at 1"

    def received(self, message: Inbound) -> None:
        self.messages.put(message)

    def lost(self, hello: Hello, reason: str) -> None:
        self.losses.put((hello.name, reason))

    def take(self) -> Inbound:
        return self.messages.get(timeout=WAIT_S)


class Bench:
    """Makes transports of one kind; ``finish`` closes them and checks that no thread or descriptor is left."""

    def __init__(self, make: TransportMaker, *, counts_descriptors: bool) -> None:
        self._make = make
        self._counts_descriptors = counts_descriptors
        self._made: list[LinkTransport] = []
        self._threads_before = threading.active_count()
        self._descriptors_before: int | None = None

    def transport(
        self, secret: str = SECRET, *, credits: CreditLimit = DEFAULT_CREDITS, handshake_timeout_s: float = 5.0
    ) -> LinkTransport:
        if self._descriptors_before is None:
            self._descriptors_before = num_descriptors()
        made = self._make(secret, credits, handshake_timeout_s)
        self._made.append(made)
        return made

    def finish(self) -> None:
        for transport in self._made:
            transport.close()
        self._made.clear()
        gc.collect()
        assert threading.active_count() == self._threads_before
        if self._counts_descriptors and self._descriptors_before is not None:
            assert num_descriptors() <= self._descriptors_before


def num_descriptors() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
