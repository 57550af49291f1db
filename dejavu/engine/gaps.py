"""Work that takes only the time that nobody else wants: what is not urgent must not slow down what is served."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

_NICENESS = 10
"""A tenth of an ordinary thread's share where cores are short, a whole core where one is free."""


def in_the_gaps(work: Callable[[], T]) -> T:
    """What ``work`` gives, done on a thread of low priority while the caller waits. Raises what it raises.

    Not on the calling thread: without privileges a priority can only be lowered, and afterwards it may be urgent.
    """
    done: Future[T] = Future()

    def run() -> None:
        # Elsewhere than on Linux a priority may belong to the whole process: then everything is as urgent as ever.
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            done.set_result(work())
        except BaseException as error:  # Whatever it is, the caller is told; nobody else would be.
            done.set_exception(error)

    threading.Thread(target=run, name="in-the-gaps", daemon=True).start()
    return done.result()
