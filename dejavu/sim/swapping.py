"""Swapping at one token stage: the device holds the KV of two microbatches, host memory that of all (DejaVu §4.2.2)."""

from __future__ import annotations

from collections import deque

from dejavu.sim.machinery import Machinery
from dejavu.sim.station import Station

_ON_DEVICE = 2


class Swapper:
    """Says when a microbatch's KV is on the device. A step's own cells go back while others come: they are few."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bandwidth = bytes_per_s
        self._ends: deque[tuple[int, float]] = deque(maxlen=_ON_DEVICE)
        """The microbatches on the device, the one that stepped last at the end, and when their steps ended."""

    def resident_s(self, station: Station, microbatch: int, num_bytes: int, now_s: float) -> float:
        """When the step can begin.

        The order of microbatches is known ahead, so the transfer begins as soon as the bus is free and the step before
        the previous one has left its place, also when this step's activations are yet to come.
        """
        if any(microbatch == held for held, _ in self._ends):
            return now_s
        place_free_s = self._ends[0][1] if len(self._ends) == _ON_DEVICE else 0.0
        duration_s = num_bytes / self._bandwidth
        station.bus_free_s = max(station.bus_free_s, place_free_s) + duration_s
        station.times.swapped_s += duration_s
        return station.bus_free_s

    def done(self, microbatch: int, now_s: float) -> None:
        """The microbatch has stepped."""
        self._ends = deque(((held, at_s) for held, at_s in self._ends if held != microbatch), maxlen=_ON_DEVICE)
        self._ends.append((microbatch, now_s))


def swapper_of(machinery: Machinery, num_microbatches: int) -> Swapper | None:
    """A stage's swapper, or None where all of its KV stays on the device."""
    bandwidth = machinery.pcie_bytes_per_s
    if not machinery.is_swapping or bandwidth is None or num_microbatches <= _ON_DEVICE:
        return None
    return Swapper(bandwidth)
