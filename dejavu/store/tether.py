"""A launcher that ties a program's life to its starter's: ``python tether.py <starter's pid> program arguments...``.

It stands alone (standard library only) so that it can run as a script in isolated mode, in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def command(starter_pid: int) -> list[str]:
    """The words to put before a program's command line.

    The kernel kills the program when the *thread* that started it ends, so start it from one that lasts.
    """
    return [sys.executable, "-I", "-S", __file__, str(starter_pid)]


def main(arguments: list[str]) -> None:
    """This process has become the program and dies with its starter (on Linux; elsewhere it is merely started)."""
    starter_pid, program = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The starter may have died before the request was made; then nobody would send the signal.
        if os.getppid() != starter_pid:
            raise SystemExit(f"its starter {starter_pid} is gone already: {program[0]} is not started")
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
