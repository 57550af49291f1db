"""While a service waits for its last answers another signal ends the wait: no clean-up is there yet to break."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dejavu.clock import Clock

_ECHO_S = 1.0
"""Wrappers pass on a signal that the terminal has sent to everybody: one that comes so soon is no second one."""


@contextmanager
def impatient(clock: Clock) -> Iterator[None]:
    """Ctrl-C or SIGTERM, a second or more from now, raises KeyboardInterrupt here, once; afterwards both are as before.

    On another thread than the main one, where no signal arrives, nothing is different.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    since_s = clock.monotonic()

    def receive(number: int, frame: FrameType | None) -> None:
        if clock.monotonic() - since_s >= _ECHO_S:
            restore()
            raise KeyboardInterrupt

    def restore() -> None:
        for number, handler in former.items():
            signal.signal(number, handler)

    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in former:
        signal.signal(number, receive)
    try:
        yield
    finally:
        restore()
