"""``bench.json``: what a load on an endpoint came to, as serving systems report it. Undefined numbers are null."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypedDict

from dejavu.report.metrics import quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What became of one request. Times are seconds since the start of the load."""

    id: str
    due_s: float
    sent_s: float
    """When the client really sent it; ``sent_s - due_s`` is the client's own lateness."""
    end_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    chunk_times_s: tuple[float, ...] = ()
    """When each piece of the answer came; one piece a token where the endpoint sends it so."""
    error: str | None = None
    """The kind of failure, such as ``http 429`` or ``timeout``; None for a whole answer."""
    detail: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first piece of the answer."""
        return self.chunk_times_s[0] - self.sent_s if self.chunk_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """A token after the first one, on average; None for an answer of less than two tokens."""
        if self.output_tokens < 2 or not self.chunk_times_s:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between one piece of the answer and the next."""
        return tuple(later - earlier for earlier, later in pairwise(self.chunk_times_s))

    @property
    def end_to_end_s(self) -> float:
        """From sending to the end of the answer."""
        return self.end_s - self.sent_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a user finds good enough, in seconds; None: not asked about."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    end_to_end_s: float | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing is asked for."""
        return self.ttft_s is None and self.tpot_s is None and self.end_to_end_s is None

    def keeps(self, sample: Sample) -> bool:
        """The answer is whole and within every limit that applies to it."""
        return sample.error is None and all(
            limit is None or value is None or value <= limit
            for value, limit in (
                (sample.ttft_s, self.ttft_s),
                (sample.tpot_s, self.tpot_s),
                (sample.end_to_end_s, self.end_to_end_s),
            )
        )


class Distribution(TypedDict):
    """Seconds."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None


class LoadCounts(TypedDict):
    """``sent`` = ``finished`` + ``failed``; ``errors`` counts the failed ones by kind."""

    sent: int
    finished: int
    failed: int
    errors: dict[str, int]
    details: dict[str, str]
    """One message of each kind."""


class LoadTokens(TypedDict):
    """Of finished requests, as the endpoint counts them."""

    prompt: int
    output: int


class LoadThroughput(TypedDict):
    """Of finished requests, over ``duration_s``."""

    requests_per_s: float | None
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None


class LoadLatency(TypedDict):
    """Of finished requests, from the moment of sending; ``inter_token_s`` is over all gaps between pieces."""

    time_to_first_token_s: Distribution
    time_per_output_token_s: Distribution
    inter_token_s: Distribution
    end_to_end_s: Distribution


class Goodput(TypedDict):
    """Requests that were answered within the limits; the share is of all that were sent."""

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    requests: int
    share: float | None
    requests_per_s: float | None


class ClientShare(TypedDict):
    """What is the client's own: how late it sent, and how many requests were under way at most."""

    lateness_s: Distribution
    most_under_way: int


class LoadReport(TypedDict):
    """The whole of ``bench.json``."""

    endpoint: str
    model: str
    began: str
    duration_s: float
    requests: LoadCounts
    tokens: LoadTokens
    throughput: LoadThroughput
    latency: LoadLatency
    goodput: Goodput | None
    client: ClientShare


def load_report(samples: Sequence[Sample], limits: Limits, *, endpoint: str, model: str, began: str) -> LoadReport:
    """The figures of a load. ``duration_s`` runs from the first request that was sent to the end of the last.

    Args:
        samples: of every request that was sent.
        limits: for the goodput.
        endpoint: its address.
        model: the name that was asked for.
        began: the date and time, for the reader.
    """
    finished = [sample for sample in samples if sample.error is None]
    failed = [sample for sample in samples if sample.error is not None]
    duration_s = max((one.end_s for one in samples), default=0.0) - min((one.sent_s for one in samples), default=0.0)
    tokens = LoadTokens(
        prompt=sum(sample.prompt_tokens for sample in finished), output=sum(sample.output_tokens for sample in finished)
    )
    return LoadReport(
        endpoint=endpoint,
        model=model,
        began=began,
        duration_s=duration_s,
        requests=LoadCounts(
            sent=len(samples),
            finished=len(finished),
            failed=len(failed),
            errors=dict(sorted(Counter(str(sample.error) for sample in failed).items())),
            details={str(sample.error): sample.detail for sample in reversed(failed) if sample.detail},
        ),
        tokens=tokens,
        throughput=LoadThroughput(
            requests_per_s=_rate(len(finished), duration_s),
            output_tokens_per_s=_rate(tokens["output"], duration_s),
            total_tokens_per_s=_rate(tokens["output"] + tokens["prompt"], duration_s),
        ),
        latency=LoadLatency(
            time_to_first_token_s=distribution(sample.ttft_s for sample in finished),
            time_per_output_token_s=distribution(sample.tpot_s for sample in finished),
            inter_token_s=distribution(gap for sample in finished for gap in sample.gaps_s),
            end_to_end_s=distribution(sample.end_to_end_s for sample in finished),
        ),
        goodput=None if limits.is_empty else _goodput(samples, limits, duration_s),
        client=ClientShare(
            lateness_s=distribution(sample.sent_s - sample.due_s for sample in samples),
            most_under_way=_most_under_way(samples),
        ),
    )


def distribution(values: Iterable[float | None]) -> Distribution:
    """Mean, quantiles and the greatest of the values that are known."""
    known = [value for value in values if value is not None]
    return Distribution(
        mean=sum(known) / len(known) if known else None,
        p50=quantile(known, 0.5),
        p95=quantile(known, 0.95),
        p99=quantile(known, 0.99),
        max=max(known, default=None),
    )


def _goodput(samples: Sequence[Sample], limits: Limits, duration_s: float) -> Goodput:
    good = sum(limits.keeps(sample) for sample in samples)
    return Goodput(
        ttft_s=limits.ttft_s,
        tpot_s=limits.tpot_s,
        e2e_s=limits.end_to_end_s,
        requests=good,
        share=good / len(samples) if samples else None,
        requests_per_s=_rate(good, duration_s),
    )


def _most_under_way(samples: Sequence[Sample]) -> int:
    # An end at the same moment as a beginning comes first.
    changes = sorted([(sample.sent_s, 1) for sample in samples] + [(sample.end_s, -1) for sample in samples])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _rate(number: float, duration_s: float) -> float | None:
    return number / duration_s if duration_s > 0 else None
