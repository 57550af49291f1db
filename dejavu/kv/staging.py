"""A small ring of reused contiguous buffers between the KV and the network: bounded, whatever the sequence.

A buffer is taken, filled, sent, and given back when the transport is done with it. While all are out, ``acquire``
waits: that is the back-pressure which keeps a fast computation from filling memory before a slow network.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from dejavu.errors import Retryable


class StagingTimeout(Retryable):
    """No staging buffer came back in time: the network is slower than the deadline, or gone."""


class StagingBuffer:
    """One contiguous buffer. ``work`` is filled beside the computation, ``host`` is what the network reads.

    On a CPU the two are one tensor; on a CUDA device ``work`` lies on the device, so that many small pieces are
    gathered there and cross the bus in one copy (DejaVu §4.1, buffered copies).
    """

    __slots__ = ("_ring", "host", "work")

    def __init__(self, ring: StagingRing, work: Tensor, host: Tensor) -> None:
        self._ring = ring
        self.work = work
        self.host = host

    def copy_to_host(self, num_bytes: int) -> None:
        """The first bytes of ``work`` are (on a CUDA stream: will be) in ``host``."""
        if self.work is not self.host:
            self.host[:num_bytes].copy_(self.work[:num_bytes], non_blocking=True)

    def payload(self, num_bytes: int) -> memoryview:
        """The first bytes of ``host``, without a copy."""
        return self.host[:num_bytes].numpy().data

    def release(self) -> None:
        """The buffer is free for the next one. Any thread; a second call does nothing."""
        self._ring.give_back(self)


class StagingRing:
    """``num_buffers`` buffers of ``buffer_bytes`` each, touched at once; any thread.

    ``pin`` makes the host side page-locked, for asynchronous copies from a CUDA ``device``.
    """

    def __init__(self, num_buffers: int, buffer_bytes: int, pin: bool = False, *, device: str = "cpu") -> None:
        if num_buffers < 1 or buffer_bytes < 1:
            raise ValueError(f"a staging ring of {num_buffers} buffers of {buffer_bytes} bytes holds nothing")
        self.num_buffers = num_buffers
        self.buffer_bytes = buffer_bytes
        self._returned = threading.Condition()
        self._free = [self._make(pin, torch.device(device)) for _ in range(num_buffers)]
        self._out: set[int] = set()

    def acquire(self, timeout_s: float) -> StagingBuffer:
        """A buffer that nobody else uses. Blocks while all are out; raises StagingTimeout at the deadline."""
        with self._returned:
            if not self._returned.wait_for(lambda: self._free, timeout_s):
                raise StagingTimeout(
                    f"all {self.num_buffers} staging buffers of {self.buffer_bytes} bytes were still being sent "
                    f"after {timeout_s} s"
                )
            buffer = self._free.pop()
            self._out.add(id(buffer))
            return buffer

    def give_back(self, buffer: StagingBuffer) -> None:
        """The buffer is free; one that is already free stays so. Raises ValueError for another ring's."""
        with self._returned:
            if id(buffer) not in self._out:
                if all(free is not buffer for free in self._free):
                    raise ValueError("the buffer belongs to another staging ring")
                return
            self._out.remove(id(buffer))
            self._free.append(buffer)
            self._returned.notify()

    @property
    def num_out(self) -> int:
        """Buffers that are taken."""
        with self._returned:
            return len(self._out)

    @property
    def nbytes(self) -> int:
        """Host bytes of all buffers."""
        return self.num_buffers * self.buffer_bytes

    def _make(self, pin: bool, device: torch.device) -> StagingBuffer:
        # Zeroed, not merely allocated: the first touch of a page costs several times a copy.
        host = torch.empty(self.buffer_bytes, dtype=torch.uint8, pin_memory=pin).zero_()
        work = host if device.type == "cpu" else torch.empty(self.buffer_bytes, dtype=torch.uint8, device=device)
        return StagingBuffer(self, work, host)
