"""One message on its way out: its bytes, its deadline, its future."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

from dejavu.transport.base import MAX_HEADER_BYTES, Buffer
from dejavu.transport.frames import INLINE_BYTES
from dejavu.transport.pieces import as_bytes, pieces_of


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
