"""Ctrl-C and SIGTERM end a run in the same orderly way, once."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from dejavu.clock import Clock
from dejavu.workflows.impatience import GRACE_S


class Interruption:
    """Turns SIGINT and SIGTERM into one KeyboardInterrupt in the main thread.

    Signals that follow within ``GRACE_S`` are noted and change nothing, so that a second Ctrl-C cannot break the
    clean-up that the first one began.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._raised_at_s: float | None = None

    @property
    def happened(self) -> bool:
        """True once a signal has interrupted the run."""
        return self._raised_at_s is not None

    def install(self) -> None:
        """Both signals come here. Only the main thread may call this."""
        signal.signal(signal.SIGINT, self.receive)
        signal.signal(signal.SIGTERM, self.receive)

    def retire(self) -> None:
        """The run is over: Ctrl-C no longer disturbs the interpreter's end, SIGTERM ends the process at once."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def receive(self, signal_number: int, frame: FrameType | None) -> None:
        """Raises KeyboardInterrupt at the first signal, and at one that comes after the grace is over."""
        now_s = self._clock.monotonic()
        if self._raised_at_s is None or now_s - self._raised_at_s > GRACE_S:
            self._raised_at_s = now_s
            raise KeyboardInterrupt
        # Logging or buffered output could be interrupted in the middle of itself here.
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"already stopping\n")
