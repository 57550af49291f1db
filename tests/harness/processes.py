"""What is left behind by a test: processes that were started during it, files in /dev/shm.

Processes are told by a mark in the environment that children inherit, so test runs side by side do not see each other.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

MARK = "DEJAVU_TEST_RUN"


def our_processes() -> dict[int, str]:
    """Command lines of this test run's other processes, by process id."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().split(b"\0")
            state = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        line = b" ".join(words).decode(errors="replace")
        if state != b"Z" and mark in environment:
            found[int(folder.name)] = line
    return found


def children_of(pid: int) -> list[int]:
    """Process ids of the direct children."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += [int(word) for word in (task / "children").read_text().split()]
    return children


def shared_memory_files() -> set[str]:
    """Names in /dev/shm."""
    return set(os.listdir("/dev/shm"))


def wait_gone(before: dict[int, str], timeout_s: float) -> dict[int, str]:
    """Processes that were not there before and are still there after ``timeout_s`` at the most."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        left = {pid: line for pid, line in our_processes().items() if pid not in before}
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.05)
