"""Time as an argument, so that tests and the simulator run the cluster's code under a clock of their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells seconds. ``now`` is comparable between processes of one host; ``monotonic`` never goes back."""

    def now(self) -> float: ...

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """The calling thread has waited."""
        time.sleep(seconds)


class VirtualClock:
    """A clock that a test or the simulator moves by hand."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Seconds of virtual time."""
        return self._now_s

    def monotonic(self) -> float:
        """Seconds of virtual time."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Virtual time is ``seconds`` later; nobody has waited."""
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Virtual time is ``seconds`` later. Raises ValueError on a negative step."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now_s += seconds
