"""``workflow=recovery``: what a failure costs, in a table and a figure (DejaVu Fig. 4, Fig. 14, Fig. 15).

Rounds, in each of which every case (no failure, replica, recompute, restart) serves the workload on a fresh cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console

from dejavu.clock import Clock, SystemClock
from dejavu.config import Config, RecoveryFigure
from dejavu.models.spec import ModelSpec
from dejavu.report.figure_style import Caption
from dejavu.report.json_file import write_json
from dejavu.report.machine import machine
from dejavu.report.progress import RichProgress
from dejavu.report.recovery_figures import draw_requests, draw_tokens
from dejavu.report.recovery_runs import (
    NONE,
    PAPER_RATIOS,
    PAPER_SHORTER,
    CaseRun,
    CaseSummary,
    case_rows,
    summarise_cases,
    times_shorter,
)
from dejavu.report.repairs import repair_line
from dejavu.report.streaming_table import as_text
from dejavu.workflows.fresh_folder import check_fresh
from dejavu.workflows.recovery_case import Case, Outcome, check_same, prepare_cases, run_case

logger = logging.getLogger(__name__)


def run(config: Config, output: Path) -> None:
    """``recovery.json`` and ``figure.png`` are in ``output``, and each run's own files under ``cases/``.

    An interrupted or failed comparison leaves ``recovery.json`` with the runs until then.
    Raises DejavuError when a cluster failed or a repair changed an answer.
    """
    check_fresh(output / "cases")
    console, clock = Console(), SystemClock()
    with RichProgress(Console(stderr=True), clock) as progress:
        cases = prepare_cases(config, progress)
        runs: list[CaseRun] = []
        for round_index in range(config.comparison.repeats):
            outcomes: dict[str, Outcome] = {}
            for turn, case in enumerate(rotated(cases, round_index)):
                folder = output / "cases" / f"{case.name}-{round_index + 1}"
                outcome = run_case(case, folder, progress, clock, round_index=round_index, turn=turn)
                outcomes[case.name] = outcome
                runs.append(outcome.run)
                write_json(output / "recovery.json", {"figure": config.comparison.figure, "runs": runs_json(runs)})
                logger.info("case %s, round %s: %.3f s", case.name, round_index + 1, outcome.run.latency_s)
            for name, outcome in outcomes.items():
                check_same(name, outcomes[NONE].answers, outcome.answers)
    write_results(config, runs, _caption(config, cases[0], clock), output, console)
    console.print(f"output: {output}", highlight=False, soft_wrap=True)


def rotated(cases: Sequence[Case], round_index: int) -> list[Case]:
    """Every case comes at every place in turn: what changes on the machine meanwhile meets each of them."""
    first = round_index % len(cases)
    return [*cases[first:], *cases[:first]]


def write_results(config: Config, runs: Sequence[CaseRun], caption: Caption, output: Path, console: Console) -> None:
    """Numbers and figure are in ``output``; table, repairs and the paper's numbers are on the console."""
    figure, summaries = config.comparison.figure, summarise_cases(runs)
    write_json(
        output / "recovery.json",
        {
            "figure": figure,
            "machine": caption.source,
            "cases": {one.case: _summary_json(one) for one in summaries},
            "paper": paper_of(figure),
            "restart_over_replica": times_shorter(summaries),
            "runs": runs_json(runs),
        },
    )
    draw = draw_requests if figure is RecoveryFigure.fig15 else draw_tokens
    draw(output / "figure.png", summaries, caption)
    console.print(as_text(case_rows(summaries, with_paper=figure is RecoveryFigure.fig14)))
    for one in summaries:
        for repair in one.typical.repairs:
            console.print(f"{one.case}: {repair_line(repair)}", highlight=False, markup=False)
    shorter = times_shorter(summaries)
    if figure is RecoveryFigure.fig15 and shorter is not None:
        console.print(f"from replicas {shorter:.2f}× shorter than restarted (paper: {PAPER_SHORTER}×)", highlight=False)


def paper_of(figure: RecoveryFigure) -> Mapping[str, float]:
    """The paper's numbers for the figure; none where it gives none."""
    match figure:
        case RecoveryFigure.fig14:
            return PAPER_RATIOS
        case RecoveryFigure.fig15:
            return {"restart_over_replica": PAPER_SHORTER}
        case RecoveryFigure.fig04:
            return {}


def runs_json(runs: Sequence[CaseRun]) -> list[Mapping[str, object]]:
    """Every run with its curves."""
    return [
        {
            "case": one.case,
            "round": one.round_index + 1,
            "turn": one.turn,
            "latency_s": one.latency_s,
            "wall_s": one.wall_s,
            "failures_s": one.failures_s,
            "repairs": one.repairs,
            "token_curve_s": one.token_curve_s,
            "end_curve_s": one.end_curve_s,
        }
        for one in runs
    ]


def _summary_json(one: CaseSummary) -> Mapping[str, object]:
    return {
        "latency_s": one.latency_s,
        "ratio": one.ratio,
        "ratios": one.ratios,
        "pause_s": one.pause_s,
        "steps_recomputed": one.steps_recomputed,
    }


def _caption(config: Config, case: Case, clock: Clock) -> Caption:
    comparison, workload, plan = config.comparison, config.workload, case.prepared.plan
    depth, repeats = plan.token_pipeline.depth, comparison.repeats
    counted = (
        f"{len(case.prepared.requests)} requests"
        if comparison.figure is RecoveryFigure.fig15
        else f"microbatch {comparison.microbatch} of {plan.token_pipeline.microbatch_rows} rows"
    )
    rounds = "one round" if repeats == 1 else f"median of {repeats} rounds"
    threads = config.cluster.threads_per_worker
    measured_on = datetime.fromtimestamp(clock.now()).date().isoformat()
    source = f"{machine()}; {threads} thread{'s' if threads > 1 else ''} a worker; {measured_on}"
    return Caption(
        title=_TITLES[comparison.figure],
        subtitle=f"{config.model.kind} on {depth} stages, {counted}, "
        f"{workload.prompt_tokens} + {workload.max_tokens} tokens; {rounds}",
        source=_computed(plan.model) + source,
    )


def _computed(model: ModelSpec) -> str:
    """For a figure: whose times a rehearsal took; nothing of a run that computed."""
    times = model.modelled
    if times is None:
        return ""
    scale = "" if times.time_scale == 1 else f" × {times.time_scale:g}"
    return f"rehearsed: times of {times.source.split('. ')[0]}{scale}, KV × {times.kv_scale:.3g}; "


_TITLES = {
    RecoveryFigure.fig04: "What a failure costs a microbatch without recovery",
    RecoveryFigure.fig14: "Tokens of a microbatch when a stage dies",
    RecoveryFigure.fig15: "Requests completed while stages die",
}
