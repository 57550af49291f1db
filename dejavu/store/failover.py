"""Calls that go to whichever declared endpoint answers, within one deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from dejavu.store.connection import Connection
from dejavu.store.faults import StoreUnavailable
from dejavu.store.spec import StoreSpec

T = TypeVar("T")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.4
_SHORTEST_ATTEMPT_S = 0.01


class Failover:
    """Keeps one connection and moves on to the next endpoint when it fails. Any thread."""

    def __init__(self, spec: StoreSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._index = 0
        self._connection: Connection | None = None

    def run(self, operation: Callable[[Connection, float], T], *, timeout_s: float | None = None) -> T:
        """What ``operation(connection, timeout_s)`` returned on the first endpoint that answered.

        The operation may run more than once, so it must bear an earlier run that took effect unseen. Blocks for at
        most ``timeout_s`` (default: the spec's). Raises StoreUnavailable at the deadline, StoreRefused at once.
        """
        budget_s = self._spec.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + budget_s
        attempt_s = budget_s / len(self._spec.endpoints)
        pause_s = _FIRST_PAUSE_S
        while True:
            remaining_s = deadline - time.monotonic()
            connection = self._hold()
            try:
                return operation(connection, max(_SHORTEST_ATTEMPT_S, min(attempt_s, remaining_s)))
            except StoreUnavailable:
                self._abandon(connection)
                if time.monotonic() + pause_s >= deadline or self._closed.wait(pause_s):
                    raise
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            finally:
                connection.release()

    def close(self) -> None:
        """Later calls raise StoreUnavailable; those in flight end within their timeout. Idempotent."""
        self._closed.set()
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.retire()

    def _hold(self) -> Connection:
        with self._lock:
            if self._closed.is_set():
                raise StoreUnavailable("this store client is closed")
            if self._connection is None:
                endpoints = self._spec.endpoints
                self._connection = Connection(self._spec, endpoints[self._index % len(endpoints)])
            self._connection.hold()
            return self._connection

    def _abandon(self, connection: Connection) -> None:
        """The next call uses the next endpoint, unless another thread has already moved on."""
        with self._lock:
            if self._connection is not connection:
                return
            self._connection = None
            self._index += 1
        connection.retire()
