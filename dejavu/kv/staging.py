"""A small ring of reused contiguous buffers between the KV and the network: bounded, whatever the sequence.

A buffer is taken, filled, sent, and given back when the transport is done with it. While all are out, ``acquire``
waits: that is the back-pressure which keeps a fast computation from filling memory before a slow network.
"""

from __future__ import annotations

import mmap
import threading
import time
from typing import Final, Protocol

import torch
from torch import Tensor

from dejavu.errors import Retryable
from dejavu.kv.fresh_memory import page_memory

_MOMENT_S: Final = 0.001


class StagingTimeout(Retryable):
    """What was handed over did not leave its buffer in time: the network is slower than the deadline, or gone."""


class Staging(Protocol):
    """Where ``scatter`` gets the memory for its messages."""

    @property
    def buffer_bytes(self) -> int:
        """The size of every buffer."""

    def acquire(self, timeout_s: float) -> StagingBuffer:
        """A buffer that nobody else uses; may block, and raises StagingTimeout at the deadline."""

    def give_back(self, buffer: StagingBuffer) -> None:
        """The buffer is free. Any thread; a second call does nothing."""


class StagingBuffer:
    """One contiguous buffer. ``work`` is filled beside the computation, ``host`` is what the network reads.

    On a CPU the two are one tensor; on a CUDA device ``work`` lies on the device, so that many small pieces are
    gathered there and cross the bus in one copy (DejaVu §4.1, buffered copies).
    """

    __slots__ = ("_host_bytes", "_staging", "host", "work")

    def __init__(self, staging: Staging, work: Tensor, host: Tensor) -> None:
        self._staging = staging
        self._host_bytes: memoryview = host.numpy().data
        self.work = work
        self.host = host

    def copy_to_host(self, num_bytes: int) -> None:
        """The first bytes of ``work`` are (on a CUDA stream: will be) in ``host``."""
        if self.work is not self.host:
            self.host[:num_bytes].copy_(self.work[:num_bytes], non_blocking=True)

    def payload(self, num_bytes: int) -> memoryview:
        """The first bytes of ``host``, without a copy."""
        return self._host_bytes[:num_bytes]

    def release(self) -> None:
        """The buffer is free for the next one. Any thread; a second call does nothing."""
        self._staging.give_back(self)


class StagingRing:
    """``num_buffers`` buffers of ``buffer_bytes`` each, touched at once; any thread.

    The host side starts on a page, so that a disk can write it past the page cache where it lies.
    ``pin`` makes the host side page-locked, for asynchronous copies from a CUDA ``device``.
    """

    def __init__(self, num_buffers: int, buffer_bytes: int, pin: bool = False, *, device: str = "cpu") -> None:
        if num_buffers < 1 or buffer_bytes < 1:
            raise ValueError(f"a staging ring of {num_buffers} buffers of {buffer_bytes} bytes holds nothing")
        self.num_buffers = num_buffers
        self.buffer_bytes = buffer_bytes
        self._returned = threading.Condition()
        self._free = self._make(pin, torch.device(device))
        self._out: set[int] = set()

    def acquire(self, timeout_s: float) -> StagingBuffer:
        """A buffer that nobody else uses. Blocks while all are out; raises StagingTimeout at the deadline."""
        with self._returned:
            if not self._free and not self._wait(time.monotonic() + timeout_s):
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
            if 2 * len(self._free) >= self.num_buffers:
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

    def _wait(self, deadline_s: float) -> bool:
        """True when a buffer is free: when half of them are, or a few have been for a moment.

        Waking for each would put the thread that sends aside once a message, in the middle of its work.
        """
        while not self._free:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._returned.wait(min(left_s, _MOMENT_S))
        return True

    def _make(self, pin: bool, device: torch.device) -> list[StagingBuffer]:
        stride = -(-self.buffer_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = _pinned(self.num_buffers * stride) if pin else _host_memory(self.num_buffers * stride)
        buffers = []
        for index in range(self.num_buffers):
            host = whole[index * stride :][: self.buffer_bytes]
            work = host if device.type == "cpu" else torch.empty(self.buffer_bytes, dtype=torch.uint8, device=device)
            buffers.append(StagingBuffer(self, work, host))
        return buffers


class LentMemory:
    """Somebody's own host memory, for one message: what is gathered into it is where it shall be, without a copy.

    ``memory`` is a contiguous uint8 tensor. Raises ValueError for another one.
    """

    def __init__(self, memory: Tensor) -> None:
        if memory.dtype != torch.uint8 or not memory.is_contiguous() or memory.is_cuda:
            raise ValueError(f"only contiguous uint8 host memory can be lent, not {memory.dtype} on {memory.device}")
        flat = memory.view(-1)
        self.buffer_bytes = flat.numel()
        self._buffer = StagingBuffer(self, flat, flat)
        self._is_used = False

    def acquire(self, timeout_s: float) -> StagingBuffer:
        """The memory. Raises ValueError the second time, because what is in it would be lost."""
        if self._is_used:
            raise ValueError(
                f"{self.buffer_bytes} bytes of lent memory are full, and more was to be gathered into them"
            )
        self._is_used = True
        return self._buffer

    def give_back(self, buffer: StagingBuffer) -> None:
        """Nothing happens: the memory is its owner's, with what is in it."""


def _host_memory(num_bytes: int) -> Tensor:
    """Bytes that start on a page and lie on huge pages where the system has them: a disk takes fewer, larger parts."""
    # Zeroed, not merely allocated: the first touch of a page costs several times a copy.
    return page_memory(num_bytes).zero_()


def _pinned(num_bytes: int) -> Tensor:
    """Page-locked bytes that start on a page."""
    whole = torch.empty(num_bytes + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=True).zero_()
    return whole[-whole.data_ptr() % mmap.PAGESIZE :][:num_bytes]
