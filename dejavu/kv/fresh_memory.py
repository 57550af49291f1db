"""Zeroed host memory that is there at once, for a pool that others wait for. Its pages come beside the computation."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: pages are there as if each had been written to, and keep what is in them."""
_PART_BYTES = 16 * 2**20
"""Asked for at once: a part is some milliseconds, so that page faults of the computation wait for no longer."""


def fresh_zeros(num_bytes: int) -> Tensor:
    """Zeroed uint8 host memory of ``num_bytes`` >= 1, made in no time: a page comes at its first use.

    A thread brings the pages of all of it meanwhile, where the system can do that without touching what is in them.
    """
    memory = page_memory(num_bytes)
    threading.Thread(target=populate, args=(memory,), name="populate", daemon=True).start()
    return memory


def page_memory(num_bytes: int) -> Tensor:
    """Zeroed uint8 memory of ``num_bytes`` >= 1 on pages of its own, huge ones where the system has them.

    No page is backed before its first use.
    """
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages says so; then these are ordinary ones.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def populate(memory: Tensor) -> bool:
    """Every page of ``memory``, which starts on one, is backed and keeps what is in it. False where the system cannot.

    Anybody may read and write the memory meanwhile.
    """
    madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if madvise is None:
        return False
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start, num_bytes = memory.data_ptr(), memory.numel()
    for offset in range(0, num_bytes, _PART_BYTES):
        if madvise(start + offset, min(_PART_BYTES, num_bytes - offset), _POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            # EINVAL: an older kernel. Whatever it is, the first use of a page brings it.
            level = logging.DEBUG if code == errno.EINVAL else logging.WARNING
            logger.log(level, "pages of a pool are not brought beforehand: %s", os.strerror(code))
            return False
    return True
