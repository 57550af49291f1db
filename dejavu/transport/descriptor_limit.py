"""Keeps connections from using up the process's file descriptors.

A UCX worker that runs out of them stops accepting for good, even when some are free again; so a connection that
would come close is refused before UCX hears of it.
"""

from __future__ import annotations

import os
import resource

from dejavu.transport.core import CoreError

_HEADROOM = 32
"""A connection takes about six, and a few more while it is set up."""


def require_descriptors() -> None:
    """Enough are left for one more connection. Raises CoreError with both numbers and the remedy."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and used + _HEADROOM > limit:
        raise CoreError(f"{used} of {limit} file descriptors are in use, too many for one more link; raise ulimit -n")
