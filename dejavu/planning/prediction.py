"""What a plan promises: throughput, latency and cost, from its time for a round. Unbounded numbers become None."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dejavu.planning.candidates import Candidate
from dejavu.planning.question import Lengths, Machines

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one candidate under full load. None: unknown, or without bound because nothing takes any time."""

    requests_per_s: float | None
    tokens_per_s: float | None
    latency_s: float
    normalized_latency_s: float | None
    """``latency_s`` per new token."""
    cost_per_hour: float | None
    """Of every declared machine, in use or idle, in the currency of the price."""
    cost_per_1000_requests: float | None
    cost_per_million_tokens: float | None


def predict(candidate: Candidate, lengths: Lengths, machines: Machines) -> Prediction:
    """The candidate's numbers."""
    new_tokens = lengths.mean_new_tokens
    price = machines.price_per_hour
    per_hour = None if price is None else price * machines.count
    a_request = None if per_hour is None else per_hour / _HOUR_S * candidate.row_s
    return Prediction(
        requests_per_s=_over(1.0, candidate.row_s),
        tokens_per_s=_over(new_tokens, candidate.row_s),
        latency_s=candidate.latency_s,
        normalized_latency_s=_over(candidate.latency_s, new_tokens),
        cost_per_hour=per_hour,
        cost_per_1000_requests=None if a_request is None else 1000 * a_request,
        cost_per_million_tokens=None if a_request is None else _over(1e6 * a_request, new_tokens),
    )


def _over(numerator: float, denominator: float) -> float | None:
    if denominator == 0:
        return None
    quotient = numerator / denominator
    return quotient if math.isfinite(quotient) else None
