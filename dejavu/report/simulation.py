"""What a simulated run leaves: ``simulation.json``, its tables, and the values behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

from dejavu.report.amounts import show_bytes, show_count, show_rate, show_seconds
from dejavu.report.streaming_table import Columns

Facts: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorker:
    """What one worker did with its time; what it was busy with and its idle time add up to the makespan."""

    name: str
    pipeline: str
    stage: int | None
    """None: on standby."""
    prompt_s: float
    step_s: float
    idle_s: float
    sent_s: float = 0.0
    """Its outgoing link was occupied for so long."""
    swapped_s: float = 0.0
    """Its bus to the device was."""

    @property
    def busy_s(self) -> float:
        """Prompts and steps together."""
        return self.prompt_s + self.step_s

    @property
    def busy_share(self) -> float:
        """Of the makespan."""
        total_s = self.busy_s + self.idle_s
        return self.busy_s / total_s if total_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """What became of one request, or in reference mode of one microbatch."""

    id: str
    arrival_s: float
    first_token_s: float | None
    """None: the reference mode does not say."""
    end_s: float
    tokens: int
    resumed: int = 0

    @property
    def normalized_s(self) -> float:
        """Seconds from its arrival to its end, over its tokens."""
        return (self.end_s - self.arrival_s) / self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A whole run. Times in seconds from its start."""

    mode: str
    is_reference: bool
    replicas: int
    makespan_s: float
    workers: Sequence[SimulatedWorker]
    requests: Sequence[SimulatedRequest]
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why requests were not served, by id."""
    repairs: Sequence[Facts] = ()
    faults_left: int = 0
    """Declared faults whose moment had not come when the last request ended."""
    makespan_without_failures_s: float | None = None
    """None: there were none."""
    sent_bytes: int = 0
    most_waiting_bytes: int = 0
    num_events: int = 0
    price_per_hour: float | None = None
    """Of one machine."""
    inputs: Facts = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return sum(one.tokens for one in self.requests)

    @property
    def cost(self) -> float | None:
        """Of all machines for the makespan; None where the price is unknown."""
        if self.price_per_hour is None:
            return None
        return self.price_per_hour * len(self.workers) * self.makespan_s / 3600

    @property
    def lost_s(self) -> float | None:
        """By how much failures made the run longer; None without failures."""
        if self.makespan_without_failures_s is None:
            return None
        return self.makespan_s - self.makespan_without_failures_s


def document(run: SimulatedRun) -> Facts:
    """``simulation.json``."""
    return {
        "mode": run.mode,
        "reference": run.is_reference,
        "replicas": run.replicas,
        "makespan_s": run.makespan_s,
        "finish_s": [one.end_s for one in run.requests],
        "arrival_s": [one.arrival_s for one in run.requests],
        "first_token_s": [one.first_token_s for one in run.requests],
        "requests": {"served": len(run.requests), "refused": run.refused},
        "tokens": run.num_tokens,
        "throughput": {
            "requests_per_s": _rate(len(run.requests), run.makespan_s),
            "tokens_per_s": _rate(run.num_tokens, run.makespan_s),
        },
        "latency": {
            "normalized_s_per_token": _spread([one.normalized_s for one in run.requests]),
            "time_to_first_token_s": _spread(
                [one.first_token_s - one.arrival_s for one in run.requests if one.first_token_s is not None]
            ),
        },
        "stages": [_worker_facts(worker, run.makespan_s) for worker in run.workers],
        "kv": {"sent_bytes": run.sent_bytes, "most_waiting_bytes": run.most_waiting_bytes},
        "repairs": run.repairs,
        "faults_left": run.faults_left,
        "recomputed": recomputed(run),
        "makespan_without_failures_s": run.makespan_without_failures_s,
        "lost_s": run.lost_s,
        "cost": run.cost,
        "events": run.num_events,
        "inputs": run.inputs,
    }


def recomputed(run: SimulatedRun) -> Mapping[str, int]:
    """Tokens whose work was done before: by prompt passes, and one by one."""
    return {
        key: sum(int(str(repair[key])) for repair in run.repairs)
        for key in ("prompt_tokens_recomputed", "tokens_replayed")
    }


def worker_rows(run: SimulatedRun) -> list[Columns]:
    """``table.csv``: a row for each worker."""
    return [
        {
            "worker": worker.name,
            "pipeline": worker.pipeline,
            "stage": "-" if worker.stage is None else worker.stage,
            "busy_share": worker.busy_share,
            "prompt_s": worker.prompt_s,
            "step_s": worker.step_s,
            "idle_s": worker.idle_s,
            "link_s": worker.sent_s,
            "swap_s": worker.swapped_s,
        }
        for worker in run.workers
    ]


def request_rows(run: SimulatedRun) -> list[Columns]:
    """``requests.csv``: a row for each request."""
    return [
        {
            "id": one.id,
            "arrival_s": one.arrival_s,
            "first_token_s": "" if one.first_token_s is None else one.first_token_s,
            "end_s": one.end_s,
            "tokens": one.tokens,
            "resumed": one.resumed,
        }
        for one in run.requests
    ]


def summary_lines(run: SimulatedRun) -> list[str]:
    """The run in a few lines for a terminal."""
    kind = "reference mode, " if run.is_reference else ""
    sets = f", {run.replicas} replicas" if run.replicas > 1 else ""
    lines = [
        f"{kind}{run.mode}{sets}: {show_seconds(run.makespan_s)} for {show_count(len(run.requests), 'request')} and "
        f"{show_count(run.num_tokens, 'token')}"
    ]
    if run.makespan_s:
        tokens, requests = run.num_tokens / run.makespan_s, len(run.requests) / run.makespan_s
        lines.append(f"throughput {show_rate(tokens, 'tokens')} ({show_rate(requests, 'requests')})")
    spread = _spread([one.normalized_s for one in run.requests])
    if spread["median"] is not None:
        lines.append(
            f"latency {show_seconds(spread['median'])} per token, end to end "
            f"(95th percentile {show_seconds(spread['p95'])})"
        )
    if run.sent_bytes:
        lines.append(
            f"KV between workers {show_bytes(run.sent_bytes)}, waiting at most {show_bytes(run.most_waiting_bytes)}"
        )
    if run.cost is not None:
        lines.append(f"cost {run.cost:.4g}")
    if run.refused:
        lines.append(f"{show_count(len(run.refused), 'request')} refused (simulation.json says why)")
    if run.faults_left:
        lines.append(f"{show_count(run.faults_left, 'fault')} had not come when the last request ended")
    if run.repairs:
        again = recomputed(run)
        lines.append(
            f"{show_count(len(run.repairs), 'repair')}: {again['prompt_tokens_recomputed']:,} tokens recomputed with "
            f"prompts, {again['tokens_replayed']:,} replayed; the run is {show_seconds(run.lost_s)} longer for it"
        )
    return lines


def _worker_facts(worker: SimulatedWorker, makespan_s: float) -> Facts:
    return {
        "worker": worker.name,
        "pipeline": worker.pipeline,
        "stage": worker.stage,
        "busy_s": worker.busy_s,
        "busy_share": worker.busy_share,
        "prompt_s": worker.prompt_s,
        "step_s": worker.step_s,
        "idle_s": worker.idle_s,
        "link_share": worker.sent_s / makespan_s if makespan_s else 0.0,
        "swap_share": worker.swapped_s / makespan_s if makespan_s else 0.0,
    }


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds else None


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"median": None, "p95": None, "max": None}
    ordered = sorted(values)
    return {
        "median": median(ordered),
        "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "max": ordered[-1],
    }
