"""``workflow=simulate``: the declared cluster under a virtual clock. Starts nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from dejavu.config import Config
from dejavu.control.plan import Plan
from dejavu.control.summary import summary
from dejavu.ids import WorkerName
from dejavu.report.figure_style import Caption
from dejavu.report.json_file import write_json
from dejavu.report.simulation import (
    SimulatedRequest,
    SimulatedRun,
    SimulatedWorker,
    document,
    request_rows,
    summary_lines,
    worker_rows,
)
from dejavu.report.spans import Span
from dejavu.report.streaming_table import as_text, write_table
from dejavu.report.timeline import write_timeline
from dejavu.report.trace_figure import draw_traces
from dejavu.sim.simulation import Setting, SimulationResult, simulate
from dejavu.sim.station import WorkerTimes
from dejavu.workflows.simulation_comparison import compare
from dejavu.workflows.simulation_inputs import Simulated, prepare
from dejavu.workflows.simulation_reference import reference_run
from dejavu.workflows.simulation_traces import trace_panel

logger = logging.getLogger(__name__)

_SHOWN_S = 60.0
"""So much of a run is in the picture at most."""


def run(config: Config, output: Path) -> None:
    """``simulation.json``, ``table.csv`` and ``requests.csv`` are in ``output``; of a run that is not the reference
    also ``plan.json``, ``timeline.json`` and ``figure.png``.

    Raises ConfigError, and InfeasibleError where the plan does not fit its machines or a failure leaves too few.
    """
    console = Console()
    if config.simulate.compare.over is not None:
        compare(config, output, console)
        console.print(f"output: {output}", highlight=False, soft_wrap=True)
        return
    if config.simulate.reference:
        done = reference_run(config)
    else:
        simulated = prepare(config)
        write_json(output / "plan.json", {**summary(simulated.setting.plan), "swapping": config.simulate.swapping})
        result = simulate(simulated.setting, simulated.requests)
        done = simulated_run(config, simulated, result)
        write_timeline(output / "timeline.json", _spans(result), start_s=0.0)
        draw(output / "figure.png", done, result, config)
    write_json(output / "simulation.json", document(done))
    rows = worker_rows(done)
    write_table(output / "table.csv", rows)
    write_table(output / "requests.csv", request_rows(done))
    console.print(as_text(rows))
    for line in summary_lines(done):
        logger.info("%s", line)
        console.print(line, highlight=False, markup=False)
    console.print(f"output: {output}", highlight=False, soft_wrap=True)


def simulated_run(config: Config, simulated: Simulated, result: SimulationResult) -> SimulatedRun:
    """The result as reports tell it. A run with failures is repeated without them, to see what they cost."""
    setting, without_s = simulated.setting, None
    if result.repairs:
        healthy = replace(setting, faults=(), failures_per_hour=0.0, most_spans=0)
        without_s = simulate(healthy, simulated.requests).makespan_s
    return SimulatedRun(
        mode=setting.plan.mode,
        is_reference=False,
        replicas=setting.replicas,
        makespan_s=result.makespan_s,
        workers=[_worker(setting, name, times) for name, times in result.workers.items()],
        requests=[
            SimulatedRequest(
                id=one.id,
                arrival_s=one.arrival_s,
                first_token_s=one.first_token_s,
                end_s=one.end_s,
                tokens=one.tokens,
                resumed=one.resumed,
            )
            for one in result.requests
        ],
        refused=simulated.refused,
        repairs=[asdict(record) for record in result.repairs],
        faults_left=result.faults_left,
        makespan_without_failures_s=without_s,
        sent_bytes=result.sent_bytes,
        most_waiting_bytes=result.most_waiting_bytes,
        num_events=result.num_events,
        price_per_hour=config.cluster.price_per_hour,
        inputs=_inputs(config, setting),
    )


def _inputs(config: Config, setting: Setting) -> Mapping[str, object]:
    cluster = config.cluster
    return {
        "costs": setting.costs.source,
        "profile": config.profile,
        "simulate": config.simulate,
        "link_gbps": cluster.link_gbps,
        "pcie_gbps": cluster.pcie_gbps,
        "price_per_hour": cluster.price_per_hour,
    }


def _worker(setting: Setting, name: WorkerName, times: WorkerTimes) -> SimulatedWorker:
    place = setting.plan.place_of(_first_of(setting.plan, name))
    return SimulatedWorker(
        name=name,
        pipeline="standby" if place is None else place.pipeline.kind,
        stage=None if place is None else place.stage.index,
        prompt_s=times.busy_s.get("prompt", 0.0),
        step_s=times.busy_s.get("step", 0.0),
        idle_s=times.idle_s,
        sent_s=times.sent_s,
        swapped_s=times.swapped_s,
    )


def _first_of(plan: Plan, name: WorkerName) -> WorkerName:
    """The worker of the first replica that has the same place."""
    names = [*plan.workers, *plan.standby]
    return names[int(name.removeprefix("w")) % len(names)]


def _spans(result: SimulationResult) -> Mapping[str, list[Span]]:
    """Work, and repairs at the workers that died."""
    spans: dict[str, list[Span]] = {name: [] for name in result.workers}
    for one in result.spans:
        spans[one.worker].append(Span(one.label, "compute", one.start_s, one.end_s - one.start_s, {"kind": one.kind}))
    for repair in result.repairs:
        for name in repair.workers:
            end_s = result.makespan_s if repair.formed_s is None else repair.formed_s
            spans[name].append(Span("repair", "recover", repair.failed_s, max(0.0, end_s - repair.failed_s)))
    return spans


def draw(path: Path, run: SimulatedRun, result: SimulationResult, config: Config) -> None:
    """``path`` shows what each worker did, from the start for as long as spans were kept."""
    last_s = max((span.end_s for span in result.spans), default=0.0)
    until_s = min(run.makespan_s, last_s, _SHOWN_S) if result.dropped_spans else min(run.makespan_s, _SHOWN_S)
    profile, sets = config.profile, f", {run.replicas} replicas" if run.replicas > 1 else ""
    caption = Caption(
        title=f"{config.model.kind}, {run.mode}{sets}: simulated execution",
        subtitle=f"{len(run.requests)} requests, makespan {run.makespan_s:.4g} s; the first {until_s:.3g} s",
        source=f"simulated; times {profile.effective_kind.value}",
    )
    draw_traces(path, [trace_panel(run.mode, result)], caption, until_s=until_s)
