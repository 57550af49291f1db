"""A worker process as whoever owns it starts it and talks to it, on this machine or on a Ray node."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

WORKER_COMMAND = (sys.executable, "-m", "dejavu.worker")

_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "THP_MEM_ALLOC_ENABLE": "1"}
"""Weights and KV are read from end to end at every step: with huge pages a step takes up to a tenth less. What the
user has set stands; where the kernel or the C library knows nothing of it, nothing changes."""


def worker_environment(num_threads: int) -> dict[str, str]:
    """This process's environment, and in it what a worker's libraries must find before they are imported."""
    return {
        **_HUGE_PAGES,
        **os.environ,
        "OMP_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        "GRPC_VERBOSITY": "NONE",
    }


def start_process(
    command: Sequence[str], log: Path, *, num_threads: int, more: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """The command runs in a session of its own; it reads from a pipe and appends what it says to ``log``.

    ``more`` is added to its environment. Raises OSError where the log cannot be written.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**worker_environment(num_threads), **(more or {})},
            start_new_session=True,
        )


def write_line(process: subprocess.Popen[bytes], line: bytes) -> bool:
    """The process will read one more line. Returns False when it has ended."""
    assert process.stdin is not None, "a worker is started with a pipe"
    try:
        process.stdin.write(line + b"\n")
        process.stdin.flush()
    except (BrokenPipeError, ValueError):
        return False
    return True


def close_input(process: subprocess.Popen[bytes]) -> None:
    """The pipe is closed; what a dead process has not read is lost."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
