"""``workflow=simulate`` with ``simulate.compare``: cases beside each other (DejaVu Fig. 20 to Fig. 26)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from textwrap import shorten

import msgspec
from rich.console import Console

from dejavu.clock import SystemClock
from dejavu.config import Config
from dejavu.config.simulate import CompareCase, CompareOver
from dejavu.config.strategy import LayersConfig, MicrobatchConfig, SplitConfig, StrategyConfig, StrategyMode
from dejavu.errors import ConfigError, DejavuError, InfeasibleError
from dejavu.planning.costs import Costs
from dejavu.planning.shape import ModelShape
from dejavu.report.comparison_table import ComparedPoint, compared_rows, draw_comparison, times_shorter
from dejavu.report.figure_style import Caption
from dejavu.report.json_file import write_json
from dejavu.report.progress import RichProgress
from dejavu.report.streaming_table import Columns, as_text, write_table
from dejavu.report.trace_figure import TracePanel, draw_traces
from dejavu.request import Request
from dejavu.sim.arrangements import Arrangement, arrangements, guessed_s
from dejavu.sim.simulation import SimulationResult, simulate
from dejavu.workflows.plan import model_shape
from dejavu.workflows.simulation_inputs import costs_of, machinery_of, plan_of, requests_of, setting_of, sorted_out
from dejavu.workflows.simulation_swapping import compare_swapping
from dejavu.workflows.simulation_traces import trace_panel

logger = logging.getLogger(__name__)

_NUM_SIMULATED = 3
"""So many of the arrangements that look best are simulated."""
_PAPER = {("disaggregated", "baseline"): 4.2, ("disaggregated", "baseline_dp"): 2.22}
"""How many times shorter the paper's makespans are at best (appendix B)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    case: CompareCase
    early_stops: bool
    machines: int
    rows: Sequence[int]
    """To choose from."""

    @property
    def name(self) -> str:
        return self.case.value if self.early_stops else f"{self.case.value}, no early stops"


def compare(config: Config, output: Path, console: Console) -> None:
    """``table.csv``, ``comparison.json`` and ``figure.png`` are in ``output``; points that failed are named.

    Raises InfeasibleError when some point failed, after the others are in ``output``.
    """
    if config.simulate.compare.over is CompareOver.swapping:
        compare_swapping(config, output, console)
        return
    shape, codec = model_shape(config)
    requests, refused = sorted_out(requests_of(config, codec, shape.vocab_size), shape.max_length)
    if not requests:
        raise ConfigError(f"workload={config.workload.kind.value} has no request in it that can be served")
    if config.simulate.compare.over is CompareOver.traces:
        _traces(config, shape, requests, output, console)
        return
    costs, by_rows = costs_of(config, shape), config.simulate.compare.over is CompareOver.microbatches
    questions = list(_questions(config))
    points = []
    with RichProgress(Console(stderr=True), SystemClock()) as progress:
        for number, question in enumerate(questions):
            progress.phase("simulating", number, len(questions))
            own = requests if question.early_stops else evened(requests)
            points.append(best(config, shape, own, costs, question))
        progress.phase("simulating", len(questions), len(questions))
    _write(config, points, costs, requests, refused, output, console, by_rows=by_rows)


def _traces(config: Config, shape: ModelShape, requests: Sequence[Request], output: Path, console: Console) -> None:
    """``figure.png`` shows what the machines do in one pipeline, and in the declared two (DejaVu Fig. 26)."""
    strategy, costs = config.strategy, costs_of(config, shape)
    split = (strategy.split.prompt, strategy.split.token)
    rows = strategy.microbatch.token
    whole = arranged(config, Arrangement(depth=sum(split), rows=rows), sum(split))
    panels: list[TracePanel] = []
    lines: list[Columns] = []
    runs = {
        f"colocated, {sum(split)} machines": replace(whole, simulate=config.simulate),
        f"disaggregated, {split[0]} + {split[1]} machines": config,
    }
    for title, own in runs.items():
        result = simulate(setting_of(own, shape, costs), requests)
        panels.append(trace_panel(title, result))
        lines.append({"case": title, "makespan_s": result.makespan_s, "tokens_per_s": _per_s(result)})
    until_s = max(panel.end_s for panel in panels)
    caption = Caption(
        title=f"{config.model.kind}: who does what when, simulated",
        subtitle=f"{len(requests)} requests in microbatches of {rows}; a line marks the end",
        source=_source(config, costs),
    )
    draw_traces(output / "figure.png", panels, caption, until_s=until_s)
    write_table(output / "table.csv", lines)
    write_json(output / "comparison.json", {"runs": lines, "costs": costs.source})
    console.print(as_text(lines))


def _per_s(result: SimulationResult) -> float:
    return result.num_tokens / result.makespan_s if result.makespan_s else 0.0


def _questions(config: Config) -> Iterator[_Question]:
    compare = config.simulate.compare
    for case in compare.cases:
        for early_stops in compare.early_stops:
            for machines in compare.machines:
                if compare.over is CompareOver.machines:
                    yield _Question(case=case, early_stops=early_stops, machines=machines, rows=compare.microbatches)
                    continue
                for rows in compare.microbatches:
                    yield _Question(case=case, early_stops=early_stops, machines=machines, rows=[rows])


def evened(requests: Sequence[Request]) -> list[Request]:
    """The same requests without early stops: each answer as long as the mean one, so that the work is the same."""
    new = round(mean(request.max_tokens for request in requests))
    return [msgspec.structs.replace(request, max_tokens=new) for request in requests]


def best(
    config: Config, shape: ModelShape, requests: Sequence[Request], costs: Costs, question: _Question
) -> ComparedPoint:
    """The shortest simulated run among the three arrangements that look best of those that fit."""
    machinery = machinery_of(config)
    bandwidth = machinery.link_bytes_per_s
    handover_s = shape.kv_bytes_per_token / bandwidth if bandwidth else 0.0

    def guess(fitted: tuple[Arrangement, Config]) -> float:
        one, own = fitted
        return guessed_s(
            one,
            requests,
            costs,
            overhead=machinery.streaming_overhead,
            handover_s=handover_s,
            in_flight=own.strategy.in_flight or 1,
        )

    reason = f"{question.case.value} cannot use {question.machines} machines"
    fitted: list[tuple[Arrangement, Config]] = []
    for one in arrangements(question.case.value, question.machines, question.rows, shape.num_layers):
        try:
            fitted.append((one, fitting(config, shape, one)))
        except DejavuError as error:
            reason = str(error).splitlines()[0]
    shortest: ComparedPoint | None = None
    num_simulated = 0
    for one, own in sorted(fitted, key=guess):
        try:
            point = _point(question, one, own, simulate(setting_of(own, shape, costs), requests), config)
        # Whatever stands against one arrangement, or one point, is no reason to lose the others.
        except DejavuError as error:
            reason = str(error).splitlines()[0]
            continue
        if shortest is None or (point.makespan_s or 0.0) < (shortest.makespan_s or 0.0):
            shortest = point
        num_simulated += 1
        if num_simulated == _NUM_SIMULATED:
            break
    if shortest is not None:
        return shortest
    logger.warning("%s, %s machines: %s", question.name, question.machines, reason)
    rows = question.rows[0] if len(question.rows) == 1 else None
    return ComparedPoint(case=question.name, machines=question.machines, rows=rows, reason=reason)


def fitting(config: Config, shape: ModelShape, one: Arrangement) -> Config:
    """The declaration with this arrangement, and as many microbatches in flight as fit. Raises InfeasibleError."""
    refusals = []
    for in_flight in one.in_flights:
        own = arranged(config, one, in_flight)
        try:
            plan_of(own, shape)
        except InfeasibleError as error:
            refusals.append(error)
            continue
        return own
    raise refusals[-1]


def arranged(config: Config, one: Arrangement, in_flight: int) -> Config:
    """The declaration with this arrangement."""
    strategy = StrategyConfig(
        mode=StrategyMode.colocated if one.depth else StrategyMode.disaggregated,
        split=SplitConfig() if one.depth else SplitConfig(prompt=one.split[0], token=one.split[1]),
        stages=one.depth or 1,
        layers=LayersConfig(),
        microbatch=MicrobatchConfig(prompt=one.rows, prompt_tokens=None, token=one.rows),
        in_flight=in_flight,
        scheduling=config.strategy.scheduling,
        streaming=config.strategy.streaming,
    )
    simulation = replace(config.simulate, replicas=one.replicas, timeline_spans=0)
    return replace(config, strategy=strategy, simulate=simulation)


def _point(
    question: _Question, one: Arrangement, own: Config, result: SimulationResult, config: Config
) -> ComparedPoint:
    price = config.cluster.price_per_hour
    return ComparedPoint(
        case=question.name,
        machines=question.machines,
        rows=one.rows,
        arrangement=one.label,
        in_flight=own.strategy.in_flight,
        makespan_s=result.makespan_s,
        tokens_per_s=_per_s(result),
        cost=None if price is None else price * one.num_machines * result.makespan_s / 3600,
    )


def _write(
    config: Config,
    points: Sequence[ComparedPoint],
    costs: Costs,
    requests: Sequence[Request],
    refused: dict[str, str],
    output: Path,
    console: Console,
    *,
    by_rows: bool,
) -> None:
    if not any(one.makespan_s is not None for one in points):
        raise InfeasibleError(points[0].reason)
    rows = compared_rows(points)
    ratios = {f"{other} / {case}": times_shorter(points, case, other, by_rows=by_rows) for case, other in _PAPER}
    write_table(output / "table.csv", rows)
    write_json(
        output / "comparison.json",
        {"points": points, "times_shorter": ratios, "refused": refused, "costs": costs.source},
    )
    draw_comparison(output / "figure.png", points, _caption(config, costs, requests), by_rows=by_rows)
    console.print(as_text(rows))
    for (case, other), paper in _PAPER.items():
        found = ratios[f"{other} / {case}"]
        if found:
            spread = f"{min(found.values()):.2f} to {max(found.values()):.2f}"
            console.print(f"{case} is {spread} times shorter than {other} (paper: up to {paper})", highlight=False)
    failed = [one for one in points if one.reason]
    for one in failed:
        console.print(f"{one.case}, {one.machines} machines: {one.reason}", highlight=False, markup=False)
    if failed:
        raise InfeasibleError(f"{len(failed)} of {len(points)} points failed, for the reasons above; output: {output}")


def _caption(config: Config, costs: Costs, requests: Sequence[Request]) -> Caption:
    cluster, compare = config.cluster, config.simulate.compare
    devices = f"{cluster.devices_per_machine} devices each"
    where = f"{compare.machines[0]} machines of {devices}" if len(compare.machines) == 1 else f"machines of {devices}"
    return Caption(
        title=f"{config.model.kind}: makespan of the best arrangement, simulated",
        subtitle=f"{len(requests)} requests, {coming(requests)}; {where}",
        source=_source(config, costs),
    )


def coming(requests: Sequence[Request]) -> str:
    """When the requests come, in words."""
    last_s = max(request.arrival_s for request in requests)
    return "all there at the start" if last_s == 0 else f"that come within {last_s:.4g} s"


def _source(config: Config, costs: Costs) -> str:
    """Where the times come from, as long as a figure is wide."""
    return shorten(f"times {config.profile.effective_kind.value}: {costs.source}", 140, placeholder=" …")
