"""What failures cost, out of runs with and without them: curves over time, and ratios within a round. Pure values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from dejavu.ids import RequestId
from dejavu.report.repairs import RepairReceipt
from dejavu.report.streaming_table import Columns
from dejavu.request import Completion

NONE, REPLICA, RECOMPUTE, RESTART = "none", "replica", "recompute", "restart"
PAPER_RATIOS = {REPLICA: 1.24, RESTART: 1.91}
"""Latency of a microbatch with one failure over that without (DejaVu Fig. 14)."""
PAPER_SHORTER = 1.16
"""Runtime by restart over runtime from replicas, with several failures (DejaVu Fig. 15)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRun:
    """The workload once, in one case. Times are seconds since serving began."""

    case: str
    round_index: int
    turn: int
    """Its place among the cases of its round."""
    wall_s: float
    """Until the last request had ended."""
    token_curve_s: tuple[float, ...]
    """At position i: when every row of the microbatch shown had its token i; empty where no microbatch is shown."""
    end_curve_s: tuple[float, ...]
    """The ends of the requests, in their order."""
    failures_s: tuple[float, ...] = ()
    """When workers failed, as far as it was seen."""
    repairs: tuple[RepairReceipt, ...] = ()

    @property
    def latency_s(self) -> float:
        """Until the microbatch shown had its last token; of a run that shows none, ``wall_s``."""
        return self.token_curve_s[-1] if self.token_curve_s else self.wall_s

    @property
    def pause_s(self) -> float:
        """The repairs' pauses together."""
        return sum(repair["total_s"] or 0.0 for repair in self.repairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSummary:
    """All rounds of one case."""

    case: str
    latency_s: float
    """The median over the rounds."""
    ratios: tuple[float, ...]
    """Of each round, to the latency without a failure in the same round: a slow hour slows both."""
    pause_s: float
    """The median over the rounds."""
    steps_recomputed: int
    """The most of a round."""
    typical: CaseRun
    """The run whose ratio is the (lower) median: what a figure shows."""

    @property
    def ratio(self) -> float:
        """The median over the rounds."""
        return median(self.ratios)


def token_curve(
    token_times: Mapping[RequestId, Sequence[float]], request_ids: Sequence[RequestId]
) -> tuple[float, ...]:
    """When all those rows had their first token, their second, and so on, as far as each of them came."""
    return tuple(max(times_s) for times_s in zip(*(token_times[one] for one in request_ids), strict=False))


def end_curve(completions: Sequence[Completion]) -> tuple[float, ...]:
    """The ends of the requests, in their order."""
    return tuple(sorted(completion.end_s for completion in completions))


def summarise_cases(runs: Sequence[CaseRun]) -> list[CaseSummary]:
    """A summary for each case, in the order of the first round. Raises ValueError for a round without ``none``."""
    without_s = {run.round_index: run.latency_s for run in runs if run.case == NONE}
    missing = {run.round_index for run in runs} - set(without_s)
    if missing:
        raise ValueError(f"round {min(missing)} has no run without a failure to compare with")
    return [
        _summary([run for run in runs if run.case == case], without_s)
        for case in dict.fromkeys(run.case for run in runs)
    ]


def _summary(runs: Sequence[CaseRun], without_s: Mapping[int, float]) -> CaseSummary:
    ratios = [run.latency_s / without_s[run.round_index] for run in runs]
    by_ratio = sorted(zip(ratios, range(len(runs)), strict=True))
    return CaseSummary(
        case=runs[0].case,
        latency_s=median(run.latency_s for run in runs),
        ratios=tuple(ratios),
        pause_s=median(run.pause_s for run in runs),
        steps_recomputed=max(sum(sum(one["steps_recomputed"].values()) for one in run.repairs) for run in runs),
        typical=runs[by_ratio[(len(runs) - 1) // 2][1]],
    )


def case_rows(summaries: Sequence[CaseSummary], *, with_paper: bool) -> list[Columns]:
    """The table: latency, its ratio to a run without a failure with the range of the rounds, the pause, the paper's."""
    rows: list[Columns] = []
    for one in summaries:
        row: Columns = {
            "case": one.case,
            "latency_s": one.latency_s,
            "ratio": one.ratio,
            "lowest": min(one.ratios),
            "highest": max(one.ratios),
            "pause_s": one.pause_s,
            "steps_again": one.steps_recomputed,
        }
        if with_paper:
            row["paper"] = PAPER_RATIOS.get(one.case, "–")
        rows.append(row)
    return rows


def times_shorter(summaries: Sequence[CaseSummary]) -> float | None:
    """How much longer the restarting case took than the one with replicas; None where one of them is missing."""
    latencies_s = {one.case: one.latency_s for one in summaries}
    if REPLICA not in latencies_s or RESTART not in latencies_s:
        return None
    return latencies_s[RESTART] / latencies_s[REPLICA]
