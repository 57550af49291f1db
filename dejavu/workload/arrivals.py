"""When requests arrive."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from dejavu.request import Request


def poisson_times(num_requests: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which an open loop of ``rate`` requests/s sends; the first at 0.

    The same seed gives the same times, and a longer run begins like a shorter one. Rate 0: all at 0.
    """
    if rate == 0:
        return [0.0] * num_requests
    return list(islice(poisson_process(rate, seed), num_requests))


def poisson_process(rate: float, seed: int) -> Iterator[float]:
    """The same times without an end; ``rate`` is above 0."""
    draw = random.Random(f"arrivals {seed}")
    now_s = 0.0
    while True:
        yield now_s
        now_s += draw.expovariate(rate)


def with_arrivals(requests: Sequence[Request], times_s: Sequence[float]) -> list[Request]:
    """The requests, each with its time of arrival."""
    return [
        msgspec.structs.replace(request, arrival_s=time_s) for request, time_s in zip(requests, times_s, strict=True)
    ]
