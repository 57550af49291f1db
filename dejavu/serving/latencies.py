"""How long a service's requests take, in buckets that dashboards know, and its tokens by the second."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dejavu.ids import RequestId
from dejavu.request import Completion

FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
NEXT_TOKEN_BOUNDS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
END_TO_END_BOUNDS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
HISTORY_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """One moment of a distribution of seconds."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    """Values up to each bound and above the one before it; the last: above all bounds."""
    sum_s: float


class Buckets:
    """A distribution that grows. One owner; ``snapshot`` under the owner's lock."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def add(self, values_s: Iterable[float]) -> None:
        """The values are part of the distribution."""
        for value_s in values_s:
            self._counts[bisect_left(self._bounds_s, value_s)] += 1
            self._sum_s += value_s

    def snapshot(self) -> Histogram:
        """The distribution so far."""
        return Histogram(bounds_s=self._bounds_s, counts=tuple(self._counts), sum_s=self._sum_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySnapshot:
    """Of the requests that have ended, and had a first token, were they finished or not."""

    time_to_first_token: Histogram
    time_per_output_token: Histogram
    """From each token to the next."""
    end_to_end: Histogram
    """Of finished requests alone."""


class Latencies:
    """An ``Observer``. Nothing but a count is kept at a token: distributions grow when a request ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first = Buckets(FIRST_TOKEN_BOUNDS_S)
        self._next = Buckets(NEXT_TOKEN_BOUNDS_S)
        self._end_to_end = Buckets(END_TO_END_BOUNDS_S)
        self._by_second: dict[int, int] = {}

    def token(self, request_id: RequestId, at_s: float) -> None:
        """See ``Observer``."""
        second = int(at_s)
        if second in self._by_second:
            self._by_second[second] += 1
            return
        with self._lock:
            self._by_second[second] = 1
            for old in [known for known in self._by_second if known < second - HISTORY_S]:
                del self._by_second[old]

    def ended(self, completion: Completion, token_times_s: Sequence[float]) -> None:
        """See ``Observer``."""
        with self._lock:
            if completion.first_token_s is not None:
                self._first.add([completion.first_token_s - completion.arrival_s])
            self._next.add(later - earlier for earlier, later in pairwise(token_times_s))
            if completion.finish_reason in ("stop", "length"):
                self._end_to_end.add([completion.end_s - completion.arrival_s])

    def snapshot(self) -> LatencySnapshot:
        """The distributions so far. Any thread."""
        with self._lock:
            return LatencySnapshot(
                time_to_first_token=self._first.snapshot(),
                time_per_output_token=self._next.snapshot(),
                end_to_end=self._end_to_end.snapshot(),
            )

    def tokens_by_second(self, now_s: float, num_seconds: int = HISTORY_S) -> list[int]:
        """Tokens in each of the last whole seconds before ``now_s``, the oldest first. Any thread."""
        last = int(now_s)
        with self._lock:
            return [self._by_second.get(second, 0) for second in range(max(0, last - num_seconds), last)]
