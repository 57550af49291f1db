"""``metrics.json``: a run in numbers. Undefined ones (no request, no token, no time) are null, never NaN."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypedDict

from dejavu.ids import RequestId
from dejavu.report.counters import RehearsalCounters, WorkerCounters
from dejavu.report.json_file import write_json
from dejavu.report.repairs import RepairReceipt
from dejavu.report.transfers import Swap, Transfer, ratio, swap_totals, transfers
from dejavu.request import Completion

__all__ = ["Metrics", "RequestTimes", "WorkerCounters", "quantile", "summarize", "write_metrics"]

FINISHED_REASONS = ("stop", "length")


class RequestCounts(TypedDict):
    """``failed`` is every submitted request that did not finish: refused, aborted or lost."""

    submitted: int
    finished: int
    failed: int
    resumed: int
    by_reason: dict[str, int]


class TokenCounts(TypedDict):
    """``prompt`` counts the prompts that got a token or finished; ``generated`` includes those of failed requests."""

    prompt: int
    generated: int


class Throughput(TypedDict):
    """Over the run's wall time."""

    tokens_per_s: float | None
    requests_per_s: float | None


class Spread(TypedDict):
    """A distribution, over finished requests (``inter_token_s``: over their gaps)."""

    median: float | None
    p95: float | None
    max: float | None


class Latency(TypedDict):
    """Seconds; see ``RequestTimes``. ``inter_token_s.max`` is the longest pause any user saw."""

    normalized_s_per_token: Spread
    time_to_first_token_s: Spread
    time_per_output_token_s: Spread
    inter_token_s: Spread


class StageMetrics(TypedDict):
    """One worker's share of the run."""

    worker: str
    pipeline: str
    stage: int
    layers: tuple[int, int]
    busy_share: float | None
    compute_s: float
    window_s: float
    steps: int
    prompts: int
    peak_rss_bytes: int
    weight_bytes: int
    kv_pool_bytes: int
    """In host memory, of a stage that swaps."""
    swap: Swap


class Rehearsal(TypedDict):
    """How stages that waited instead of computing kept to their times, all of them together."""

    time_scale: float
    kv_scale: float
    passes: int
    planned_s: float
    late_s: float
    late_share: float | None
    most_late_s: float


class Metrics(TypedDict):
    """The whole of ``metrics.json``; docs/metrics.md explains each field."""

    requests: RequestCounts
    tokens: TokenCounts
    wall_s: float
    throughput: Throughput
    latency: Latency
    transfers: dict[str, Transfer]
    swap: Swap
    stages: list[StageMetrics]
    kv: dict[str, int]
    repairs: list[RepairReceipt]
    rehearsal: Rehearsal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """How long one finished request took, in seconds; None where it had too few tokens to tell."""

    latency_s: float
    num_tokens: int
    time_to_first_token_s: float | None
    time_per_output_token_s: float | None
    gaps_s: tuple[float, ...] = ()
    """Between one token and the next."""

    @property
    def normalized_s(self) -> float | None:
        """End-to-end latency a generated token (DejaVu §5.1)."""
        return self.latency_s / self.num_tokens if self.num_tokens else None

    @classmethod
    def of(cls, completion: Completion, token_times_s: Sequence[float] = ()) -> RequestTimes:
        """The times of one completion; ``token_times_s`` (seconds of the run, a token each) sharpen the later ones."""
        first_s, num_tokens = completion.first_token_s, len(completion.tokens)
        times_s = tuple(token_times_s)
        if len(times_s) >= 2:
            decode_s: float | None = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
        elif first_s is not None and num_tokens >= 2:
            decode_s = (completion.end_s - first_s) / (num_tokens - 1)
        else:
            decode_s = None
        return cls(
            latency_s=completion.end_s - completion.arrival_s,
            num_tokens=num_tokens,
            time_to_first_token_s=None if first_s is None else first_s - completion.arrival_s,
            time_per_output_token_s=decode_s,
            gaps_s=tuple(later - earlier for earlier, later in pairwise(times_s)),
        )


def summarize(
    completions: Sequence[Completion],
    token_times: Mapping[RequestId, Sequence[float]],
    workers: Mapping[str, WorkerCounters],
    wall_s: float,
    repairs: Sequence[RepairReceipt] = (),
    *,
    num_submitted: int | None = None,
) -> Metrics:
    """The metrics of a run. ``num_submitted`` where requests may have no completion (a run that was cut short)."""
    finished = [completion for completion in completions if completion.finish_reason in FINISHED_REASONS]
    times = [RequestTimes.of(completion, token_times.get(completion.id, ())) for completion in finished]
    num_generated = sum(len(completion.tokens) for completion in completions)
    ordered = sorted(workers.values(), key=lambda worker: (worker.pipeline, worker.stage, worker.name))
    return Metrics(
        requests=_request_counts(completions, len(finished), num_submitted),
        tokens=TokenCounts(
            prompt=sum(one.prompt_tokens for one in completions if one.tokens or one.finish_reason in FINISHED_REASONS),
            generated=num_generated,
        ),
        wall_s=wall_s,
        throughput=Throughput(tokens_per_s=ratio(num_generated, wall_s), requests_per_s=ratio(len(finished), wall_s)),
        latency=Latency(
            normalized_s_per_token=_spread(one.normalized_s for one in times),
            time_to_first_token_s=_spread(one.time_to_first_token_s for one in times),
            time_per_output_token_s=_spread(one.time_per_output_token_s for one in times),
            inter_token_s=_spread(gap for one in times for gap in one.gaps_s),
        ),
        transfers=transfers(ordered),
        swap=swap_totals([one.swap for one in ordered]),
        stages=[_stage(worker) for worker in ordered],
        kv=_kv_counters(ordered),
        repairs=list(repairs),
        rehearsal=_rehearsal([one.rehearsal for one in ordered if one.rehearsal is not None]),
    )


def write_metrics(path: Path, metrics: Metrics) -> None:
    """``path`` holds the metrics as indented JSON, whole or not at all."""
    write_json(path, metrics)


def quantile(values: Sequence[float], fraction: float) -> float | None:
    """The value below which ``fraction`` of ``values`` lies, interpolated between neighbours; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below, above = ordered[math.floor(position)], ordered[math.ceil(position)]
    return below + (above - below) * (position - math.floor(position))


def _request_counts(completions: Sequence[Completion], num_finished: int, num_submitted: int | None) -> RequestCounts:
    submitted = len(completions) if num_submitted is None else max(num_submitted, len(completions))
    return RequestCounts(
        submitted=submitted,
        finished=num_finished,
        failed=submitted - num_finished,
        resumed=sum(completion.resumed > 0 for completion in completions),
        by_reason=dict(sorted(Counter(completion.finish_reason for completion in completions).items())),
    )


def _spread(values: Iterable[float | None]) -> Spread:
    known = [value for value in values if value is not None]
    return Spread(median=quantile(known, 0.5), p95=quantile(known, 0.95), max=max(known, default=None))


def _stage(worker: WorkerCounters) -> StageMetrics:
    return StageMetrics(
        worker=worker.name,
        pipeline=worker.pipeline,
        stage=worker.stage,
        layers=worker.layers,
        busy_share=worker.busy_share,
        compute_s=worker.compute_s,
        window_s=worker.window_s,
        steps=worker.steps,
        prompts=worker.prompts,
        peak_rss_bytes=worker.peak_rss_bytes,
        weight_bytes=worker.weight_bytes,
        kv_pool_bytes=worker.kv_pool_bytes,
        swap=swap_totals([worker.swap]),
    )


def _rehearsal(stages: Sequence[RehearsalCounters]) -> Rehearsal | None:
    if not stages:
        return None
    planned_s, late_s = sum(one.planned_s for one in stages), sum(one.late_s for one in stages)
    return Rehearsal(
        time_scale=stages[0].time_scale,
        kv_scale=stages[0].kv_scale,
        passes=sum(one.passes for one in stages),
        planned_s=planned_s,
        late_s=late_s,
        late_share=ratio(late_s, planned_s),
        most_late_s=max(one.most_late_s for one in stages),
    )


def _kv_counters(workers: Sequence[WorkerCounters]) -> dict[str, int]:
    """Sums over the workers; the four that judge a run's integrity are always there."""
    totals = dict.fromkeys(("accepted", "duplicate", "stale", "corrupt"), 0)
    for worker in workers:
        for name, number in worker.kv.items():
            totals[name] = totals.get(name, 0) + number
    return totals
