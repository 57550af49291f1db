"""One message on its way out: its bytes, its deadline, its future, and the transfers that it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

from dejavu.transport.base import MAX_HEADER_BYTES, Buffer
from dejavu.transport.frames import FRAME_BYTES, FRAME_TAG, INLINE_BYTES, Head, Long, encode
from dejavu.transport.pieces import as_bytes, pieces_of

_LAST_TAG = 2**32 - 1


class TagCounter:
    """Tags for a link's transfers; they come again only after four thousand million others."""

    def __init__(self) -> None:
        self._next = FRAME_TAG + 1

    def take(self, count: int) -> range:
        """That many tags in a row."""
        if self._next + count > _LAST_TAG:
            self._next = FRAME_TAG + 1
        first = self._next
        self._next += count
        return range(first, first + count)


class Outgoing:
    """A message that is queued or being sent; its buffers stay referenced until ``future`` is done."""

    __slots__ = ("deadline_s", "future", "header", "inline", "num_bytes", "operations_left", "pieces")

    def __init__(self, header: bytes, payload: Sequence[Buffer], *, timeout_s: float) -> None:
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {len(header)} bytes; at most {MAX_HEADER_BYTES}, the rest is payload")
        buffers = as_bytes(payload)
        payload_bytes = sum(buffer.nbytes for buffer in buffers)
        self.header = bytes(header)
        self.num_bytes = len(header) + payload_bytes
        rides_inline = payload_bytes <= INLINE_BYTES
        self.inline = b"".join(buffers) if rides_inline else b""
        self.pieces: tuple[Buffer, ...] = () if rides_inline else pieces_of(buffers)
        self.deadline_s = time.monotonic() + timeout_s
        self.operations_left = 0
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()

    def transfers(self, tags: TagCounter) -> list[tuple[int, Buffer]]:
        """What to send, in order and under which tag: the frame first, then what did not fit into it."""
        piece_tags = tags.take(len(self.pieces))
        piece_bytes = tuple(piece.nbytes for piece in self.pieces)
        frame = encode(Head(self.header, self.inline, piece_bytes, piece_tags.start))
        pieces = list(zip(piece_tags, self.pieces, strict=True))
        if len(frame) <= FRAME_BYTES:
            return [(FRAME_TAG, memoryview(frame)), *pieces]
        long_tag = tags.take(1).start
        announcement = encode(Long(len(frame), long_tag))
        return [(FRAME_TAG, memoryview(announcement)), (long_tag, memoryview(frame)), *pieces]
