"""``simulate.reference=true``: a request is a whole microbatch, as in the original project's simulators."""

from __future__ import annotations

from dejavu.config import Config, StrategyMode
from dejavu.errors import ConfigError
from dejavu.report.simulation import SimulatedRequest, SimulatedRun, SimulatedWorker
from dejavu.sim.reference import ReferenceResult, colocated, disaggregated, group_arrivals
from dejavu.workflows.simulation_inputs import requests_of, sorted_out


def reference_run(config: Config) -> SimulatedRun:
    """The declared strategy as the originals simulate it; ``workload.rate`` counts groups of as many as machines.

    Raises ConfigError for a workload without a request that can be served.
    """
    strategy, profile = config.strategy, config.profile
    requests, refused = sorted_out(requests_of(config, None, 1), max_length=2**62)
    if not requests:
        raise ConfigError(f"workload={config.workload.kind.value} has no request in it that can be served")
    whole_prompt_s, whole_token_s = profile.prompt_time_s, profile.token_time_s
    if whole_prompt_s is None or whole_token_s is None:
        raise ConfigError("simulate.reference=true needs profile.prompt_time_s and profile.token_time_s")
    trace = [request.max_tokens for request in requests]
    is_colocated = strategy.mode is StrategyMode.colocated
    machines = strategy.stages if is_colocated else strategy.split.prompt + strategy.split.token
    rate = config.workload.rate
    arrival_s = (
        tuple(request.arrival_s for request in requests) if rate is None else group_arrivals(len(trace), rate, machines)
    )
    if is_colocated:
        result = colocated(
            trace, arrival_s, depth=machines, prompt_s=whole_prompt_s / machines, token_s=whole_token_s / machines
        )
    else:
        result = disaggregated(
            trace,
            arrival_s,
            prompt_depth=strategy.split.prompt,
            token_depth=strategy.split.token,
            prompt_s=whole_prompt_s / strategy.split.prompt,
            token_s=whole_token_s / strategy.split.token,
            cache_s=config.simulate.cache_time_ms / 1e3,
        )
    return SimulatedRun(
        mode=strategy.mode.value,
        is_reference=True,
        replicas=1,
        makespan_s=result.makespan_s,
        workers=_workers(config, result),
        requests=[
            SimulatedRequest(id=request.id, arrival_s=at_s, first_token_s=None, end_s=end_s, tokens=request.max_tokens)
            for request, at_s, end_s in zip(requests, result.arrival_s, result.finish_s, strict=True)
        ],
        refused=refused,
        price_per_hour=config.cluster.price_per_hour,
        inputs={"profile": config.profile, "simulate": config.simulate},
    )


def _workers(config: Config, result: ReferenceResult) -> list[SimulatedWorker]:
    strategy = config.strategy
    if strategy.mode is StrategyMode.colocated:
        places = [("colocated", stage) for stage in range(strategy.stages)]
    else:
        places = [("prompt", stage) for stage in range(strategy.split.prompt)]
        places += [("token", stage) for stage in range(strategy.split.token)]
    return [
        SimulatedWorker(
            name=f"w{number}",
            pipeline=kind,
            stage=stage,
            prompt_s=result.prompt_s[number],
            step_s=result.token_s[number],
            idle_s=result.makespan_s - result.prompt_s[number] - result.token_s[number],
        )
        for number, (kind, stage) in enumerate(places)
    ]
