"""What a figure says of the machine on which it was measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def machine() -> str:
    """``AMD EPYC, 2 cores, Linux 6.1``: processor, cores that this process may use, kernel. No host name."""
    cores = len(os.sched_getaffinity(0))
    system = f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"
    return f"{processor(_CPUINFO)}, {cores} core{'s' if cores > 1 else ''}, {system}"


def processor(cpuinfo: Path) -> str:
    """The processor's name in ``cpuinfo``, or the kind of machine where there is none."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine()
