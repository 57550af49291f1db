"""``workflow=rates``: throughput and latency over offered rate, in one pipeline and in two (DejaVu Fig. 12).

Every rate is served by every case on a fresh cluster, and simulated; beside them stands what the planner promises.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from rich.console import Console

from dejavu.clock import SystemClock
from dejavu.config import Config
from dejavu.errors import DejavuError
from dejavu.report.figure_style import Caption
from dejavu.report.json_file import write_json
from dejavu.report.machine import machine
from dejavu.report.progress import RichProgress
from dejavu.report.rate_figures import draw_rates
from dejavu.report.rate_runs import LIVE, SIMULATED, FailedPoint, RatePoint, highest, rate_rows
from dejavu.report.streaming_table import as_text, write_table
from dejavu.workflows.fresh_folder import check_fresh
from dejavu.workflows.rates_case import Case, prepare_cases, promise, serve_case, simulate_case

logger = logging.getLogger(__name__)


def run(config: Config, output: Path) -> None:
    """``rates.json``, ``table.csv`` and ``figure.png`` are in ``output``; each live run's files under ``cases/``.

    An interrupted comparison leaves ``rates.json`` with the points until then; those that failed are in it, too.
    Raises ConfigError and InfeasibleError before anything runs, and DejavuError when some point failed, after the
    others are in ``output``.
    """
    check_fresh(output / "cases")
    console = Console()
    cases = prepare_cases(config)
    for request_id, reason in cases[0].simulated.refused.items():
        logger.warning("request %s is left out everywhere: %s", request_id, reason)
    decision = promise(config)
    planned = {name: one for name, one in decision.tokens_per_s.items() if name in {case.name for case in cases}}
    points, failed = _points(config, cases, output)
    if points:
        _write(config, cases, points, failed, planned, decision.reason, output, console)
    for one in failed:
        console.print(f"{one.case}, {one.rate:g} requests/s, {one.source}: {one.reason}", highlight=False, markup=False)
    if failed:
        raise DejavuError(f"{len(failed)} of {len(failed) + len(points)} points failed, for the reasons above")
    console.print(f"output: {output}", highlight=False, soft_wrap=True)


def _points(config: Config, cases: Sequence[Case], output: Path) -> tuple[list[RatePoint], list[FailedPoint]]:
    """Every rate in every case: simulated first, which takes seconds, then live, the cases in turn at each rate."""
    clock, offered = SystemClock(), config.rates.offered
    sources = (SIMULATED, LIVE) if config.rates.live else (SIMULATED,)
    asked = [(source, rate, case) for source in sources for rate in offered for case in cases]
    points: list[RatePoint] = []
    failed: list[FailedPoint] = []
    with RichProgress(Console(stderr=True), clock) as progress:
        for number, (source, rate, case) in enumerate(asked):
            progress.batches(number, len(asked), f"{source}, {case.label}, {rate:g} requests/s")
            try:
                if source == SIMULATED:
                    point = simulate_case(case, rate)
                else:
                    point = serve_case(case, rate, output / "cases" / f"{case.name}-{rate:g}", progress, clock)
            # One point's misfortune is no reason to lose the others.
            except DejavuError as error:
                logger.exception("%s, %g requests/s, %s", case.name, rate, source)
                reason = str(error).partition("\n")[0]
                failed.append(FailedPoint(case=case.name, source=source, rate=rate, reason=reason))
            else:
                points.append(point)
                logger.info("%s %s, %g requests/s: %.1f tokens/s", source, case.name, rate, point.tokens_per_s)
            write_json(output / "rates.json", {"points": points, "failed": failed})
        progress.batches(len(asked), len(asked), "done")
    return points, failed


def _write(
    config: Config,
    cases: Sequence[Case],
    points: Sequence[RatePoint],
    failed: Sequence[FailedPoint],
    planned: Mapping[str, float],
    reason: str,
    output: Path,
    console: Console,
) -> None:
    rows = rate_rows(points)
    most = {"planned": dict(planned), **{source: highest(points, source) for source in (SIMULATED, LIVE)}}
    write_table(output / "table.csv", rows)
    write_json(
        output / "rates.json",
        {
            "points": [{**asdict(one), "tokens_per_s": one.tokens_per_s} for one in points],
            "failed": failed,
            "refused": cases[0].simulated.refused,
            "highest": most,
            "plan": reason,
        },
    )
    labels = {case.name: case.label for case in cases}
    draw_rates(output / "figure.png", points, planned, labels, _caption(config, cases))
    console.print(as_text(rows))
    console.print(f"planner: {reason}", highlight=False, markup=False, soft_wrap=True)
    for source, own in most.items():
        if len(own) == 2:
            ratio = own["disaggregated"] / own["colocated"]
            console.print(
                f"{source}: {labels['disaggregated']} reaches {ratio:.2f} times the throughput of "
                f"{labels['colocated']} ({own['disaggregated']:.4g} and {own['colocated']:.4g} tokens/s)",
                highlight=False,
                soft_wrap=True,
            )


def _caption(config: Config, cases: Sequence[Case]) -> Caption:
    workload, rows = config.workload, config.strategy.microbatch.token
    profile = config.profile.effective_kind.value
    measured_on = datetime.fromtimestamp(SystemClock().now()).date().isoformat()
    computing = "rehearsed" if config.model.compute.value == "modelled" else "live"
    where = f"{computing} on {machine()}; {measured_on}; " if config.rates.live else ""
    return Caption(
        title=f"{config.model.kind}: throughput and latency over offered rate",
        subtitle=f"{len(cases[0].simulated.requests)} requests of {workload.prompt_tokens} tokens, answers of "
        f"{workload.median_tokens or workload.max_tokens:g} in the median; {rows} rows a microbatch",
        source=f"{where}simulated with times {profile}",
    )
