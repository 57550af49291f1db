"""The C heap of a worker. Activations are megabytes, made and freed at every layer."""

from __future__ import annotations

import ctypes
import logging
import sys

logger = logging.getLogger(__name__)

# malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_MOST_BYTES = 2**31 - 1
_TOP_PAD_BYTES = 64 * 2**20


def keep_freed_memory() -> None:
    """Freed memory stays with the process (glibc), so that large tensors do not fault in fresh pages every time.

    Otherwise malloc maps and unmaps each tensor above 32 MiB or less, and the page faults cost a prompt of 1024
    tokens a tenth of its time. A heap other than glibc's is left as it is.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        logger.info("not glibc: the heap is left as it is")
        return
    for option, value in ((_M_TRIM_THRESHOLD, _MOST_BYTES), (_M_TOP_PAD, _TOP_PAD_BYTES), (_M_MMAP_MAX, 0)):
        if mallopt(option, value) != 1:
            logger.warning("malloc refused option %d = %d", option, value)
