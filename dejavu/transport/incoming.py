"""One message on its way in: where its payload goes and when it is whole."""

from __future__ import annotations

from collections.abc import Callable

from dejavu.transport.base import Hello, Inbound
from dejavu.transport.buffer_pool import BufferPool, Bytes
from dejavu.transport.core import CoreEndpoint, CoreError
from dejavu.transport.frames import FrameError, Head, Long, decode


class Incoming:
    """A message of a link.

    ``hold`` is asked, with its size, before memory is taken for it; ``completed`` is called when it is whole,
    ``failed`` when it will never be. On the core's thread, except ``recycle``.
    """

    def __init__(
        self,
        endpoint: CoreEndpoint,
        pool: BufferPool,
        *,
        hold: Callable[[int], bool],
        completed: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        self._hold = hold
        self._endpoint = endpoint
        self._pool = pool
        self._completed = completed
        self._failed = failed
        self._header = b""
        self._payload = memoryview(b"")
        self._array: Bytes | None = None
        self._pieces_left = 0
        self.num_bytes = 0
        self.is_whole = False
        self.is_released = False

    def take_head(self, head: Head) -> None:
        """The payload is being received. Fails rather than raises when there is no memory for it."""
        self._header = head.header
        payload_bytes = sum(head.piece_bytes)
        self.num_bytes = len(head.header) + len(head.inline) + payload_bytes
        if not self._hold(self.num_bytes):
            return
        if not head.piece_bytes:
            self._payload = memoryview(head.inline)
            self._finish()
            return
        try:
            self._array = self._pool.take(payload_bytes)
        except MemoryError:
            self._failed(f"no memory for a payload of {payload_bytes} bytes")
            return
        self._payload = self._array.data[:payload_bytes]
        self._pieces_left = len(head.piece_bytes)
        begin = 0
        for index, size in enumerate(head.piece_bytes):
            self._endpoint.recv(head.first_tag + index, self._payload[begin : begin + size], self._piece_done)
            begin += size

    def take_long(self, long: Long) -> None:
        """The head itself is being received; it comes like a piece."""
        buffer = memoryview(bytearray(long.num_bytes))

        def done(failure: CoreError | None) -> None:
            if failure is not None:
                self._failed(str(failure))
                return
            try:
                head = decode(buffer)
            except FrameError as error:
                self._failed(str(error))
                return
            if isinstance(head, Head):
                self.take_head(head)
            else:
                self._failed(f"unexpected {type(head).__name__} where a long Head was announced")

        self._endpoint.recv(long.tag, buffer, done)

    def inbound(self, hello: Hello, release: Callable[[], None]) -> Inbound:
        """The message for the handler; it calls ``release`` when it is dealt with."""
        return Inbound(hello=hello, header=self._header, payload=self._payload, release=release)

    def recycle(self) -> None:
        """The payload's memory may serve another message."""
        array, self._array = self._array, None
        if array is not None:
            self._pool.give(array)

    def _piece_done(self, failure: CoreError | None) -> None:
        if failure is not None:
            self._failed(str(failure))
            return
        self._pieces_left -= 1
        if self._pieces_left == 0:
            self._finish()

    def _finish(self) -> None:
        self.is_whole = True
        self._completed()
