"""Receive buffers that are used again, because fresh pages cost several times the transfer itself."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
_SMALLEST_BYTES = 64 * 1024
_CLASSES_PER_DOUBLING = 4


class BufferPool:
    """Free buffers by size class, at most ``idle_bytes`` of them in all. Any thread."""

    def __init__(self, idle_bytes: int) -> None:
        self._idle_bytes = idle_bytes
        self._held_bytes = 0
        self._free: dict[int, list[Bytes]] = {}
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes of the buffers that wait for their next use."""
        return self._held_bytes

    def take(self, num_bytes: int) -> Bytes:
        """An array of at least ``num_bytes`` bytes with arbitrary content. Raises MemoryError."""
        size = size_class(num_bytes)
        with self._lock:
            free = self._free.get(size)
            if free:
                self._held_bytes -= size
                return free.pop()
        return np.empty(size, dtype=np.uint8)

    def give(self, array: Bytes) -> None:
        """The array may be handed out again; nobody may touch it until then."""
        with self._lock:
            if self._held_bytes + array.nbytes > self._idle_bytes:
                return
            self._held_bytes += array.nbytes
            self._free.setdefault(array.nbytes, []).append(array)


def size_class(num_bytes: int) -> int:
    """The size that is allocated for a request: at most a quarter more, so that few sizes serve all."""
    if num_bytes <= _SMALLEST_BYTES:
        return _SMALLEST_BYTES
    step = (1 << (num_bytes - 1).bit_length() - 1) // _CLASSES_PER_DOUBLING
    return -(-num_bytes // step) * step
