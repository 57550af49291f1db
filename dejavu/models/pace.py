"""Keeps a rehearsing stage to its modelled times, and an account of how well this machine managed."""

from __future__ import annotations

from dejavu.clock import Clock


class Pace:
    """One stage's time. Main thread only.

    A device begins its next pass when the one before has ended, if the work was there by then: what the host does
    between two passes hides under the computation. So a pass begins at the end of the last one, or when the stage had
    something to do again (``idle``), whichever is later; but never so long ago that it would be over by now.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_s = clock.monotonic()
        self.num_passes = 0
        self.planned_s = 0.0
        """What the passes should have taken together."""
        self.late_s = 0.0
        """By how much they ended too late, together."""
        self.most_late_s = 0.0
        """By how much the latest of them did."""

    def idle(self) -> None:
        """Until now there was nothing to do."""
        self._free_s = max(self._free_s, self._clock.monotonic())

    def begin(self, seconds: float) -> float:
        """A pass of so many seconds is under way. Returns when it began, on the clock's monotonic time."""
        return max(self._free_s, self._clock.monotonic() - seconds)

    def wait(self, until_s: float) -> None:
        """It is ``until_s`` or later; the thread has slept meanwhile."""
        ahead_s = until_s - self._clock.monotonic()
        if ahead_s > 0:
            self._clock.sleep(ahead_s)

    def end(self, began_s: float, seconds: float) -> None:
        """The pass that began then is over, and counted."""
        due_s = began_s + seconds
        self.wait(due_s)
        late_s = max(0.0, self._clock.monotonic() - due_s)
        self._free_s = due_s
        self.num_passes += 1
        self.planned_s += seconds
        self.late_s += late_s
        self.most_late_s = max(self.most_late_s, late_s)
