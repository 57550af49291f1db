"""While a service waits for its last answers another signal ends the wait, and none after it breaks the clean-up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dejavu.clock import Clock

GRACE_S = 15.0
"""Signals that come so soon after one that has interrupted change nothing: a clean-up is under way."""
_ECHO_S = 1.0
"""Wrappers pass on a signal that the terminal has sent to everybody: one that comes so soon is no second one."""


@contextmanager
def impatient(clock: Clock) -> Iterator[None]:
    """Ctrl-C or SIGTERM, a second or more from now, raises KeyboardInterrupt here, once. Afterwards both are as before,
    but for ``GRACE_S`` after one that has raised: those that come so soon after it change nothing.

    On another thread than the main one, where no signal arrives, nothing is different.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    since_s = clock.monotonic()
    raised_s: float | None = None

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal raised_s
        now_s = clock.monotonic()
        if raised_s is None:
            if now_s - since_s >= _ECHO_S:
                raised_s = now_s
                raise KeyboardInterrupt
        elif now_s - raised_s > GRACE_S and callable(handler := former[signal.Signals(number)]):
            handler(number, frame)

    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in former:
        signal.signal(number, receive)
    try:
        yield
    finally:
        if raised_s is None:
            for number, handler in former.items():
                signal.signal(number, handler)
