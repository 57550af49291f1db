"""When requests arrive."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from dejavu.request import Request


def poisson_times(num_requests: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which an open loop of ``rate`` requests/s sends; the first at 0.

    The same seed gives the same times, and a longer run begins like a shorter one. Rate 0: all at 0.
    """
    if rate == 0:
        return [0.0] * num_requests
    draw = random.Random(f"arrivals {seed}")
    now_s = 0.0
    times_s = []
    for _ in range(num_requests):
        times_s.append(now_s)
        now_s += draw.expovariate(rate)
    return times_s


def with_arrivals(requests: Sequence[Request], times_s: Sequence[float]) -> list[Request]:
    """The requests, each with its time of arrival."""
    return [
        msgspec.structs.replace(request, arrival_s=time_s) for request, time_s in zip(requests, times_s, strict=True)
    ]
