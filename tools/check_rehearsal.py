"""Whether a rehearsal and the simulator agree: the same declaration run by both, for several ways to use machines.

    python tools/check_rehearsal.py [--case colocated-4 ...] [--json FILE] [override ...]

A rehearsal is the live cluster with modelled computation, so what differs is what the simulator leaves out (messages,
threads, the machine's load) or sees otherwise. The simulator's times are multiplied by the rehearsal's time scale.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from hydra import compose, initialize_config_module

from dejavu.config import Config, load, register_schema, validate
from dejavu.planning.costs import Costs, ScaledCosts
from dejavu.report.completions import CompletionWriter
from dejavu.report.machine import machine
from dejavu.report.metrics import Metrics
from dejavu.report.progress import SilentProgress
from dejavu.report.spans import Span
from dejavu.sim.simulation import SimulationResult, simulate
from dejavu.workflows import simulation_inputs
from dejavu.workflows.cluster import running_cluster
from dejavu.workflows.generate import Recorder, collect, serve
from dejavu.workflows.preparation import Prepared, prepare

WANTED = 0.05
DEFAULTS = (
    "model=opt-66b",
    "model.compute=modelled",
    "model.max_length=1024",
    "profile=published",
    "cluster.devices_per_machine=2",
    "workload=lmsys-like",
    "workload.num_requests=64",
    "workload.prompt_tokens=500",
    "workload.median_tokens=40",
    "workload.max_tokens=146",
    "strategy.microbatch.prompt=8",
    "strategy.microbatch.token=8",
)
CASES: Mapping[str, Sequence[str]] = {
    "colocated-4": ("strategy=colocated", "strategy.stages=4", "model.time_scale=5"),
    "colocated-8": ("strategy=colocated", "strategy.stages=8", "model.time_scale=10"),
    "split-1+3": ("strategy.split.prompt=1", "strategy.split.token=3", "strategy.in_flight=4", "model.time_scale=4"),
    "split-2+6": ("strategy.split.prompt=2", "strategy.split.token=6", "strategy.in_flight=8", "model.time_scale=8"),
    "split-3+5": ("strategy.split.prompt=3", "strategy.split.token=5", "strategy.in_flight=8", "model.time_scale=8"),
}
"""Time scales that make a step of a stage 60 ms or more: of 30 ms, a hop takes 5 % and more on two busy cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One case, run by both. Times in seconds."""

    case: str
    rehearsed_s: float
    """Makespan."""
    simulated_s: float
    with_hops_s: float
    """Simulated with the pause between stages that the rehearsal had."""
    hop_s: float
    """Of those pauses the median: from the end of a step on a stage until the next one, if idle, began it."""
    step_s: float
    """The median of a step on a stage."""
    late_share: float

    @property
    def difference(self) -> float:
        """Of the rehearsal from the simulation."""
        return self.rehearsed_s / self.simulated_s - 1


def main(arguments: Sequence[str]) -> int:
    """The table is on the terminal, and in ``--json``. 0 when every difference is small enough."""
    options = parsed(arguments)
    compared: list[Compared] = []
    for case in options.case or CASES:
        compared.append(compare(case, config_of((*DEFAULTS, *CASES[case], *options.overrides))))
        sys.stdout.write(line_of(compared[-1]) + "\n")
        sys.stdout.flush()
    if options.json is not None:
        cases = [{**asdict(one), "difference": one.difference} for one in compared]
        options.json.write_text(json.dumps({"machine": machine(), "wanted": WANTED, "cases": cases}, indent=2) + "\n")
    return 0 if all(abs(one.difference) <= WANTED for one in compared) else 1


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="such as workload.num_requests=32")
    return parser.parse_args(arguments)


def config_of(overrides: Sequence[str]) -> Config:
    """The declaration of one case."""
    register_schema()
    with initialize_config_module("dejavu.conf", version_base="1.3"):
        config = load(compose("config", overrides=list(overrides)), directory=Path.cwd())
    validate(config)
    return config


def compare(case: str, config: Config) -> Compared:
    """The case as both have run it."""
    rehearsed_s, metrics, spans = rehearse(config)
    hop_s = hop_of(spans)
    rehearsal = metrics["rehearsal"]
    assert rehearsal is not None
    return Compared(
        case=case,
        rehearsed_s=rehearsed_s,
        simulated_s=simulated(config).makespan_s,
        with_hops_s=simulated(config, hop_s).makespan_s,
        hop_s=hop_s,
        step_s=statistics.median(span.duration_s for one in spans.values() for span in one if span.name == "step"),
        late_share=rehearsal["late_share"] or 0.0,
    )


def rehearse(config: Config) -> tuple[float, Metrics, Mapping[str, Sequence[Span]]]:
    """The workload on a live cluster with modelled computation: makespan, metrics and what each worker did."""
    prepared: Prepared = prepare(config, SilentProgress())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rehearsal-")))
        writer = stack.enter_context(CompletionWriter(folder / "completions.jsonl"))
        recorder = Recorder(writer, SilentProgress(), len(prepared.requests))
        cluster = stack.enter_context(running_cluster(config, prepared.plan, folder, SilentProgress()))
        wall_s = serve(cluster, prepared, recorder)
        counters, spans = collect(cluster)
    unfinished = [one.id for one in recorder.completions if one.finish_reason != "length"]
    if unfinished:
        raise SystemExit(f"requests failed: {unfinished}")
    return wall_s, recorder.metrics(counters, wall_s), spans


def simulated(config: Config, hop_s: float = 0.0) -> SimulationResult:
    """The same under a virtual clock."""
    both = replace(config, simulate=replace(config.simulate, hop_ms=hop_s * 1e3))
    inputs = simulation_inputs.prepare(both)
    costs: Costs = ScaledCosts(costs=inputs.setting.costs, scale=config.model.time_scale)
    return simulate(replace(inputs.setting, costs=costs), inputs.requests)


def hop_of(spans: Mapping[str, Sequence[Span]]) -> float:
    """Seconds; 0 where no stage ever waited for the one before it."""
    passes: dict[tuple[object, object], list[_Step]] = {}
    for listed in spans.values():
        free_s = 0.0
        for span in sorted((one for one in listed if one.category == "compute"), key=lambda one: one.start_s):
            if span.name == "step":
                step = _Step(start_s=span.start_s, end_s=span.end_s, free_s=free_s)
                passes.setdefault((span.args["microbatch"], span.args["step"]), []).append(step)
            free_s = span.end_s
    hops: list[float] = []
    for steps in passes.values():
        ordered = sorted(steps, key=lambda step: step.start_s)
        hops += [later.start_s - before.end_s for before, later in pairwise(ordered) if later.free_s < before.end_s]
    return max(0.0, statistics.median(hops)) if hops else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One stage's part of a step."""

    start_s: float
    end_s: float
    free_s: float
    """When the stage's pass before it had ended."""


def line_of(one: Compared) -> str:
    """For the terminal."""
    return (
        f"{one.case:12} rehearsed {one.rehearsed_s:8.2f} s, simulated {one.simulated_s:8.2f} s: {one.difference:+.1%}; "
        f"with "
        f"hops of {one.hop_s * 1e3:.2f} ms {one.with_hops_s:8.2f} s: {one.rehearsed_s / one.with_hops_s - 1:+.1%}; "
        f"steps of {one.step_s * 1e3:.1f} ms, late {one.late_share:.1%}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
