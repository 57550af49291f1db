"""Host memory for landing rows, reused: a fresh page costs several times the copy into it."""

from __future__ import annotations

import torch
from torch import Tensor


class LandingMemory:
    """Gives out uint8 buffers and takes them back. Not threadsafe: its owner has a lock.

    At most ``max_free_bytes`` lie unused. ``pin`` makes them page-locked, for a CUDA device's copies.
    """

    def __init__(self, max_free_bytes: int, pin: bool) -> None:
        self._max_free_bytes = max_free_bytes
        self._pin = pin
        self._free: list[Tensor] = []

    @property
    def free_bytes(self) -> int:
        """Bytes that lie unused."""
        return sum(buffer.nbytes for buffer in self._free)

    def get(self, num_bytes: int) -> Tensor:
        """A buffer of at least ``num_bytes``, contents undefined: the smallest free one, or a new one."""
        fitting = [index for index, buffer in enumerate(self._free) if buffer.nbytes >= num_bytes]
        if not fitting:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin)
        return self._free.pop(min(fitting, key=lambda index: self._free[index].nbytes))

    def put(self, buffer: Tensor) -> None:
        """The buffer may be given out again; the smallest free ones go when too much lies unused."""
        self._free.append(buffer)
        while self._free and self.free_bytes > self._max_free_bytes:
            del self._free[min(range(len(self._free)), key=lambda index: self._free[index].nbytes)]
