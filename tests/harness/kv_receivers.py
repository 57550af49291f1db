"""Receivers of KV for tests of what sends it: copies of rows behind a network that delivers, holds or fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from dejavu.kv.accepted import InboxCounters
from dejavu.kv.chunk import ChunkHeader, KvMessage, decode_message
from dejavu.kv.replica import ReplicaStore


class Receivers:
    """A ``Sender`` to stores by owner's name. A message lands as it is sent; its future resolves when the test says.

    ``refuse`` is raised by ``send``, ``fail`` is what futures fail with. ``on_send`` is called on the sending thread.
    """

    def __init__(self, stores: Mapping[str, ReplicaStore]) -> None:
        self.stores = stores
        self.letters: list[tuple[str, KvMessage]] = []
        self.futures: list[Future[None]] = []
        self.unresolved_at_send: list[int] = []
        """For each message, how many of those before it were not resolved yet."""
        self.arrived = threading.Semaphore(0)
        self.is_open = True
        self.refuse: Exception | None = None
        self.fail: Exception | None = None
        self.on_send: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    def send(self, owner: str, header: bytes, payload: Sequence[memoryview]) -> Future[None]:
        self.on_send()
        if self.refuse is not None:
            raise self.refuse
        message = decode_message(header)
        if self.fail is None:
            answer = self.stores[owner].accept(message, payload[0])
            assert answer.corrupt == ()
        future: Future[None] = Future()
        with self._lock:
            self.unresolved_at_send.append(sum(not one.done() for one in self.futures))
            self.letters.append((owner, message))
            self.futures.append(future)
            is_held = not self.is_open
        if self.fail is not None:
            future.set_exception(self.fail)
        elif not is_held:
            future.set_result(None)
        self.arrived.release()
        return future

    def await_letters(self, count: int) -> None:
        """So many more messages have been sent."""
        for _ in range(count):
            assert self.arrived.acquire(timeout=30)

    def open(self) -> None:
        """Every message that was held resolves, and from now on each at once."""
        with self._lock:
            self.is_open = True
            held = [future for future in self.futures if not future.done()]
        for future in held:
            future.set_result(None)

    @property
    def chunks(self) -> list[ChunkHeader]:
        """All that were sent, in order."""
        return [chunk for _, message in self.letters for chunk in message.chunks]

    def counters(self, owner: str) -> InboxCounters:
        """What a store says of its chunks."""
        return self.stores[owner].counters
