"""What differs between a CPU and a CUDA device when KV is copied beside the computation: order, and waiting for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeAlias

import torch

Mark: TypeAlias = "torch.cuda.Event | None"
"""A point in the computation's order; None where everything before it is done already."""


class Copier(Protocol):
    """Orders copies after the computation that made their source, without stopping the computation."""

    @property
    def gathers_at_once(self) -> bool:
        """Whether a small gather is best done by the computing thread itself, because nothing runs beside it anyway.

        On a CPU a step's gather takes less than waking another thread and taking turns with it on the interpreter's
        lock; on a CUDA device it would make the computing thread wait for its own kernels.
        """

    def mark(self) -> Mark:
        """The point that the computation has been given orders up to. Called on the computing thread."""

    def copying(self, after: Mark) -> AbstractContextManager[None]:
        """Copies made inside begin after ``after``; when the block ends, they are done and may be read by the host."""


class CpuCopier:
    """A CPU computes when it is called, so there is nothing to order and nothing to wait for."""

    gathers_at_once = True

    def mark(self) -> Mark:
        """None."""
        return None

    def copying(self, after: Mark) -> AbstractContextManager[None]:
        """A block that does nothing of its own."""
        return nullcontext()


class CudaCopier:
    """Copies on a side stream of ``device``, so that they run beside the kernels of the computing stream.

    The caller keeps the source tensors alive until ``copying`` has ended; that is also what keeps PyTorch's
    caching allocator from giving their memory to the computing stream again.
    """

    gathers_at_once = False

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        # PyTorch leaves these two constructors without annotations.
        self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        """An event on the computing thread's current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def copying(self, after: Mark) -> Iterator[None]:
        """Copies go to the side stream; the calling thread (not the computation) waits for them at the end."""
        with torch.cuda.stream(self._side):
            if after is not None:
                self._side.wait_event(after)
            try:
                yield
            finally:
                self._side.synchronize()


def copier_for(device: str) -> Copier:
    """The copier of a device such as ``cpu`` or ``cuda:0``."""
    return CudaCopier(device) if torch.device(device).type == "cuda" else CpuCopier()
