"""Throughput and latency over offered rate: points as rows, and what each case reaches at most. Pure values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from dejavu.report.streaming_table import Columns

LIVE, SIMULATED = "live", "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePoint:
    """The workload once, offered at one rate to one case. Seconds of the machines that are meant."""

    case: str
    source: str
    """``live`` or ``simulated``."""
    rate: float
    """Requests per second, offered."""
    makespan_s: float
    """From the first arrival to the last request's end."""
    tokens: int
    """New ones, of all requests."""
    normalized_s: float
    """Seconds from arrival to end over new tokens, the mean over the requests."""
    first_token_s: float
    """From arrival to the first token, the mean over the requests."""

    @property
    def tokens_per_s(self) -> float:
        """Throughput."""
        return self.tokens / self.makespan_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """One request, as runs and simulations know it. Seconds from the start."""

    arrival_s: float
    first_token_s: float
    end_s: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedPoint:
    """A point that could not be had."""

    case: str
    source: str
    rate: float
    reason: str


def rate_point(
    case: str, source: str, rate: float, requests: Sequence[RequestTimes], *, scale: float = 1.0
) -> RatePoint:
    """The point of at least one request. ``scale``: what seconds were multiplied with in a rehearsal."""
    return RatePoint(
        case=case,
        source=source,
        rate=rate,
        makespan_s=(max(one.end_s for one in requests) - min(one.arrival_s for one in requests)) / scale,
        tokens=sum(one.tokens for one in requests),
        normalized_s=fmean((one.end_s - one.arrival_s) / one.tokens for one in requests) / scale,
        first_token_s=fmean(one.first_token_s - one.arrival_s for one in requests) / scale,
    )


def rate_rows(points: Sequence[RatePoint]) -> list[Columns]:
    """``table.csv``."""
    return [
        {
            "case": one.case,
            "source": one.source,
            "offered_per_s": one.rate,
            "tokens_per_s": one.tokens_per_s,
            "s_per_token": one.normalized_s,
            "first_token_s": one.first_token_s,
            "makespan_s": one.makespan_s,
        }
        for one in points
    ]


def highest(points: Sequence[RatePoint], source: str) -> dict[str, float]:
    """The highest throughput of each case, in new tokens per second."""
    found: dict[str, float] = {}
    for one in points:
        if one.source == source:
            found[one.case] = max(found.get(one.case, 0.0), one.tokens_per_s)
    return found
