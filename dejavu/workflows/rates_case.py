"""The cases of a comparison over offered rates: one workload, a declaration each; a live or simulated run of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dejavu.clock import Clock
from dejavu.config import Config, StrategyMode
from dejavu.config.rates import RateCase, RatesConfig
from dejavu.config.rehearsal import Compute
from dejavu.config.strategy import SplitConfig
from dejavu.control.summary import summary
from dejavu.errors import DejavuError
from dejavu.planning.candidates import candidates
from dejavu.planning.prediction import predict
from dejavu.planning.search import plan
from dejavu.report.completions import CompletionWriter
from dejavu.report.json_file import write_json
from dejavu.report.metrics import summarize, write_metrics
from dejavu.report.progress import Progress, SilentProgress
from dejavu.report.rate_runs import LIVE, SIMULATED, RatePoint, RequestTimes, rate_point
from dejavu.report.timeline import write_timeline
from dejavu.request import Completion
from dejavu.sim.simulation import simulate
from dejavu.workflows.cluster import running_cluster
from dejavu.workflows.generate import Recorder, collect, serve
from dejavu.workflows.plan import question
from dejavu.workflows.preparation import Prepared
from dejavu.workflows.preparation import prepare as prepare_live
from dejavu.workflows.simulation_inputs import Simulated, prepare
from dejavu.workflows.streaming_case import LabelledProgress
from dejavu.workload.arrivals import poisson_times, with_arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to use the machines."""

    name: str
    label: str
    """For people: ``colocated 2`` or ``disaggregated 1 + 1``."""
    config: Config
    simulated: Simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What the planner says of these machines and this workload."""

    reason: str
    tokens_per_s: Mapping[str, float]
    """The most that each case is promised."""


def prepare_cases(config: Config) -> list[Case]:
    """Every plan is made, nothing runs. Raises ConfigError, or InfeasibleError where a case does not fit."""
    return [_case(config, case) for case in config.rates.cases]


def _case(config: Config, case: RateCase) -> Case:
    split, strategy = config.strategy.split, config.strategy
    label = f"disaggregated {split.prompt} + {split.token}"
    if case is RateCase.colocated:
        label = f"colocated {split.prompt + split.token}"
        strategy = replace(
            strategy, mode=StrategyMode.colocated, stages=split.prompt + split.token, split=SplitConfig()
        )
    own = replace(config, strategy=strategy, rates=RatesConfig())
    return Case(name=case.value, label=label, config=own, simulated=prepare(own))


def promise(config: Config) -> Promise:
    """The planner's answer, and its predictions for the two cases. Raises ConfigError."""
    asked = question(config)
    split = config.strategy.split
    asked = replace(asked, machines=replace(asked.machines, count=split.prompt + split.token, pcie_gbps=None))
    found: dict[str, float] = {}
    for one in candidates(asked):
        is_declared = (one.prompt_depth, one.token_depth) == (split.prompt, split.token)
        tokens_per_s = predict(one, asked.lengths, asked.machines).tokens_per_s
        if tokens_per_s is not None and (one.mode == "colocated" or is_declared):
            found[one.mode] = tokens_per_s
    return Promise(reason=plan(asked).reason, tokens_per_s=found)


def simulate_case(case: Case, rate: float) -> RatePoint:
    """The point under the virtual clock."""
    requests = case.simulated.requests
    times_s = poisson_times(len(requests), rate, case.config.workload.seed)
    setting = replace(case.simulated.setting, most_spans=0)
    result = simulate(setting, with_arrivals(requests, times_s))
    return rate_point(
        case.name,
        SIMULATED,
        rate,
        [
            RequestTimes(arrival_s=one.arrival_s, first_token_s=one.first_token_s, end_s=one.end_s, tokens=one.tokens)
            for one in result.requests
        ],
    )


def serve_case(case: Case, rate: float, folder: Path, progress: Progress, clock: Clock) -> RatePoint:
    """The point on a cluster of its own, whose files lie in ``folder``.

    Raises DejavuError when the cluster failed or a request was not answered.
    """
    folder.mkdir(parents=True)
    config = case.config
    scale = config.model.time_scale if config.model.compute is Compute.modelled else 1.0
    live = replace(config, workload=replace(config.workload, rate=rate / scale))
    prepared = served_as_simulated(case, prepare_live(live, SilentProgress()), rate / scale)
    write_json(folder / "plan.json", summary(prepared.plan))
    shown = LabelledProgress(progress, f"{case.label}, {rate:g} requests/s")
    with CompletionWriter(folder / "completions.jsonl") as writer:
        recorder = Recorder(writer, shown, len(prepared.requests))
        with running_cluster(live, prepared.plan, folder, shown) as cluster:
            start_s = clock.now()
            wall_s = serve(cluster, prepared, recorder)
            counters, spans = collect(cluster)
    metrics = summarize(
        recorder.completions, recorder.token_times, counters, wall_s, num_submitted=len(prepared.requests)
    )
    write_metrics(folder / "metrics.json", metrics)
    write_timeline(folder / "timeline.json", spans, start_s=start_s)
    return rate_point(case.name, LIVE, rate, _times(case, recorder.completions), scale=scale)


def served_as_simulated(case: Case, prepared: Prepared, rate: float) -> Prepared:
    """The same with the requests of the simulated run alone, which come at the same times."""
    ids = {request.id for request in case.simulated.requests}
    served = [request for request in prepared.requests if request.id in ids]
    times_s = poisson_times(len(served), rate, case.config.workload.seed)
    return replace(prepared, requests=with_arrivals(served, times_s))


def _times(case: Case, completions: Sequence[Completion]) -> list[RequestTimes]:
    times = []
    for one in completions:
        if one.finish_reason != "length" or one.first_token_s is None:
            raise DejavuError(f"{case.label}: request {one.id} failed: {one.error or one.finish_reason}")
        times.append(
            RequestTimes(
                arrival_s=one.arrival_s, first_token_s=one.first_token_s, end_s=one.end_s, tokens=len(one.tokens)
            )
        )
    return times
