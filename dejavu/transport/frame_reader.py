"""Keeps receive buffers posted for a connection's frames and hands the frames on in the order they were sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from dejavu.transport.core import CoreEndpoint, CoreError
from dejavu.transport.frames import FRAME_BYTES, FRAME_TAG, Frame, FrameError, decode

_NUM_POSTED = 4


class _Posted:
    """A receive buffer and whether it has been filled."""

    __slots__ = ("buffer", "filled")

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(FRAME_BYTES))
        self.filled = False


class FrameReader:
    """Calls ``received`` for each frame until ``stop``; ``failed`` once when that cannot go on."""

    def __init__(
        self, endpoint: CoreEndpoint, *, received: Callable[[Frame], None], failed: Callable[[str], None]
    ) -> None:
        self._endpoint = endpoint
        self._received = received
        self._failed = failed
        self._posted: deque[_Posted] = deque()
        self._running = True

    def start(self) -> None:
        """Buffers are posted; frames may come."""
        for _ in range(_NUM_POSTED):
            self._post(_Posted())

    def stop(self) -> None:
        """Nothing is called any more."""
        self._running = False

    def _post(self, slot: _Posted) -> None:
        slot.filled = False
        self._posted.append(slot)
        self._endpoint.recv(FRAME_TAG, slot.buffer, lambda failure: self._completed(slot, failure))

    def _completed(self, slot: _Posted, failure: CoreError | None) -> None:
        if not self._running:
            return
        if failure is not None:
            self._fail(str(failure))
            return
        slot.filled = True
        # A long frame may complete after a short one that was sent later; only the oldest buffer is next.
        while self._running and self._posted and self._posted[0].filled:
            self._take(self._posted.popleft())

    def _take(self, slot: _Posted) -> None:
        try:
            frame = decode(slot.buffer)
        except FrameError as error:
            self._fail(str(error))
            return
        self._post(slot)
        self._received(frame)

    def _fail(self, reason: str) -> None:
        self._running = False
        self._failed(reason)
