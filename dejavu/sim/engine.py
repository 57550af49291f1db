"""The discrete-event core: what is due next happens, and the virtual clock jumps there."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from dejavu.clock import VirtualClock

Action = Callable[[], None]


class EventEngine:
    """Actions in order of time; of those due at one time, the first planned comes first.

    Holds only what is still to come, so memory does not grow with the number of events that were.
    """

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.now_s = 0.0
        """Seconds of virtual time, as the clock says."""
        self.num_events = 0
        self._events: list[tuple[float, int, Action]] = []
        self._num_planned = 0

    def at(self, time_s: float, action: Action) -> None:
        """``action`` happens at ``time_s``, or now where that is past already."""
        self._num_planned += 1
        heapq.heappush(self._events, (time_s if time_s > self.now_s else self.now_s, self._num_planned, action))

    def after(self, delay_s: float, action: Action) -> None:
        """``action`` happens ``delay_s`` from now."""
        self.at(self.now_s + delay_s, action)

    def soon(self, delay_s: float, action: Action) -> None:
        """``action`` happens ``delay_s`` from now; without a delay it has happened."""
        if delay_s:
            self.at(self.now_s + delay_s, action)
        else:
            action()

    def run(self, *, until: Callable[[], bool]) -> None:
        """Everything that was due has happened, or ``until`` is true after some event: what is left is dropped."""
        events = self._events
        while events and not until():
            time_s, _, action = heapq.heappop(events)
            if time_s > self.now_s:
                self.clock.advance(time_s - self.now_s)
                self.now_s = time_s
            self.num_events += 1
            action()
        events.clear()
