"""What a declaration must satisfy for a workflow that starts nothing, and who may take a model of sizes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dejavu.config.cluster import ClusterConfig
from dejavu.config.fault import FaultConfig
from dejavu.config.planning import ProfileConfig, ProfileKind, ProfilingConfig, ShapeConfig
from dejavu.config.rehearsal import Compute
from dejavu.config.schema import Config, ModelConfig, WorkflowName, WorkloadKind
from dejavu.config.strategy import StrategyMode
from dejavu.errors import ConfigError

PLANNING = (WorkflowName.plan, WorkflowName.simulate)
"""Workflows that run no model and rehearse none."""
_STRATEGY_DECIDES = (WorkflowName.generate, WorkflowName.serve, WorkflowName.rates)
"""Workflows whose number of machines is the strategy's; of a simulation, see ``check_simulate``."""
_OWNERS = {
    "path": (ProfileKind.measured,),
    "hardware": (ProfileKind.published, ProfileKind.roofline),
    "engine": (ProfileKind.published,),
    "tflops": (ProfileKind.roofline,),
    "memory_gb_per_s": (ProfileKind.roofline,),
}
_OF_A_MICROBATCH = "SECONDS: of a microbatch through the whole model on one machine"
_NEEDED = {
    ProfileKind.given: {"prompt_time_s": _OF_A_MICROBATCH, "token_time_s": _OF_A_MICROBATCH},
    ProfileKind.measured: {"path": "FILE, as workflow=profile writes it"},
    ProfileKind.published: {"hardware": "NAME, such as a100-80gb"},
    ProfileKind.roofline: {"hardware": "NAME", "tflops": "NUMBER", "memory_gb_per_s": "NUMBER"},
}
_MOST = 10**9
_MOST_NEIGHBOURS = 64
_LEAST = 1e-9
"""Bounds beyond any machine: what is outside is a slip, and products and quotients of what is inside stay finite."""


def check_planning(config: Config) -> None:
    """Machines, profile and model's sizes make sense. Raises ConfigError naming key, value and limit."""
    _check_machines(config.cluster)
    _check_shape(config.model)
    _check_profile(config.profile)
    is_auto = config.strategy.mode is StrategyMode.auto
    if is_auto:
        _check_auto(config)
    else:
        _check_ignored_machines(config)
    is_rehearsal = config.model.compute is Compute.modelled
    is_comparing = config.workflow.name is WorkflowName.rates
    if config.workflow.name in PLANNING or is_auto or is_rehearsal or is_comparing:
        _check_needed(config.profile)
    if config.workflow.name is WorkflowName.plan and config.fault != FaultConfig():
        raise ConfigError("fault is for a cluster that runs, and workflow=plan starts none")
    if config.workflow.name is WorkflowName.profile:
        _check_profiling(config)
    elif config.profiling != ProfilingConfig():
        raise ConfigError(f"profiling is for workflow=profile, and the choice is {config.workflow.name.value}")
    if config.model.is_shape and not (config.workflow.name in PLANNING or is_rehearsal or is_comparing):
        raise ConfigError(
            f"model={config.model.kind} is sizes without weights, for {_listed(PLANNING)}, and the choice is "
            f"workflow={config.workflow.name.value}\ntake a model with weights, such as model=smollm2-135m, "
            "or rehearse with model.compute=modelled"
        )
    # A service takes its requests from outside.
    is_serving = config.workflow.name is WorkflowName.serve
    if config.model.is_shape and config.workload.kind is WorkloadKind.chat and not is_serving:
        raise ConfigError(
            f"workload=chat is text, and model={config.model.kind} is sizes without a tokenizer\n"
            "take lengths: workload=lmsys-like, workload=synthetic or workload=trace"
        )


def _check_auto(config: Config) -> None:
    planning = (WorkflowName.generate, WorkflowName.serve, WorkflowName.plan)
    if config.workflow.name not in planning:
        raise ConfigError(f"strategy=auto is for {_listed(planning)}, and the choice is {config.workflow.name.value}")
    if config.cluster.num_machines is None and config.cluster.num_workers is None:
        raise ConfigError("strategy=auto needs cluster.num_machines=NUMBER, the workers that it may use")
    if config.fault != FaultConfig():
        raise ConfigError("fault names workers and microbatches, and strategy=auto knows them only once it has planned")


def _check_ignored_machines(config: Config) -> None:
    """A run has the machines of its strategy; another number would be ignored."""
    wanted, strategy = config.cluster.num_machines, config.strategy
    if wanted is None or config.workflow.name not in _STRATEGY_DECIDES:
        return
    if wanted not in (strategy.num_workers, config.cluster.num_workers):
        raise ConfigError(
            f"cluster.num_machines={wanted}: strategy={strategy.mode.value} runs on {strategy.num_workers} workers\n"
            "give strategy.stages, or strategy.split.prompt and .token, and leave cluster.num_machines out\n"
            "strategy=auto and workflow=plan say how to use so many"
        )


def _listed(workflows: Sequence[WorkflowName]) -> str:
    return " and ".join(f"workflow={name.value}" for name in workflows)


def _check_machines(cluster: ClusterConfig) -> None:
    _between("cluster.num_machines", cluster.num_machines, 1, 100_000)
    _between("cluster.devices_per_machine", cluster.devices_per_machine, 1, 100_000)
    for key in ("link_gbps", "pcie_gbps"):
        _between(f"cluster.{key}", getattr(cluster, key), _LEAST, _MOST, " Gbit/s")
    _between("cluster.price_per_hour", cluster.price_per_hour, 0, _MOST)


def _check_profile(profile: ProfileConfig) -> None:
    _between("profile.prompt_time_s", profile.prompt_time_s, 0, _MOST, " s")
    _between("profile.token_time_s", profile.token_time_s, 0, _MOST, " s")
    _between("profile.streaming_overhead", profile.streaming_overhead, 1, _MOST)
    for key, other in (("prompt_time_s", "token_time_s"), ("token_time_s", "prompt_time_s")):
        if getattr(profile, key) is None and getattr(profile, other) is not None:
            raise ConfigError(f"profile.{other} is given without profile.{key}={_OF_A_MICROBATCH}")
    for key in ("tflops", "memory_gb_per_s", "compute_efficiency", "memory_efficiency"):
        _between(f"profile.{key}", getattr(profile, key), _LEAST, _MOST)
    for key, kinds in _OWNERS.items():
        if getattr(profile, key) is not None and profile.kind not in kinds:
            owners = " and ".join(f"profile={kind.value}" for kind in kinds)
            raise ConfigError(
                f"profile.{key}={getattr(profile, key)}: is for {owners}, and the choice is "
                f"profile={profile.kind.value}"
            )


def _check_needed(profile: ProfileConfig) -> None:
    for key, example in _NEEDED[profile.effective_kind].items():
        if getattr(profile, key) is None:
            raise ConfigError(f"profile={profile.kind.value} needs profile.{key}={example}")


def _check_profiling(config: Config) -> None:
    profiling = config.profiling
    for key in ("rows", "prompt_tokens"):
        values: list[int] = getattr(profiling, key)
        if not values:
            raise ConfigError(f"profiling.{key}=[]: name at least one")
        if len(set(values)) < len(values):
            raise ConfigError(f"profiling.{key} names one twice; profiling.repeats measures again")
        _between(f"profiling.{key}", min(values), 1, _MOST)
    _between("profiling.steps", profiling.steps, 1, _MOST)
    _between("profiling.repeats", profiling.repeats, 1, _MOST)
    _between("profiling.neighbours", profiling.neighbours, 0, _MOST_NEIGHBOURS)
    length, most = max(profiling.prompt_tokens) + profiling.steps + 1, config.model.max_length
    if most is not None and length > most:
        raise ConfigError(f"model.max_length={most}: the longest prompt and its steps are {length} positions")
    if config.fault != FaultConfig():
        raise ConfigError("fault: workflow=profile measures a worker that is well")


def _check_shape(model: ModelConfig) -> None:
    if model.is_shape:
        _check_sizes(model.shape)
    elif model.shape != ShapeConfig():
        raise ConfigError(f"model.shape is for the models without weights, and the choice is model={model.kind}")


def _check_sizes(shape: ShapeConfig) -> None:
    for key in ("num_layers", "hidden_size", "num_heads", "feed_forward_size", "vocab_size"):
        _between(f"model.shape.{key}", getattr(shape, key), 1, _MOST)
    for key in ("num_kv_heads", "head_dim", "num_positions"):
        _between(f"model.shape.{key}", getattr(shape, key), 1, _MOST)
    _between("model.shape.feed_forward_matrices", shape.feed_forward_matrices, 2, 3)
    if shape.num_kv_heads is not None and shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            f"model.shape.num_kv_heads={shape.num_kv_heads}: must divide model.shape.num_heads={shape.num_heads}"
        )
    if shape.head_dim is None and shape.hidden_size % shape.num_heads:
        raise ConfigError(
            f"model.shape.num_heads={shape.num_heads}: must divide model.shape.hidden_size={shape.hidden_size}\n"
            "or give model.shape.head_dim"
        )


def _between(key: str, value: float | None, least: float, most: float, unit: str = "") -> None:
    """Raises ConfigError for a number outside [least, most], NaN included; None passes."""
    if value is None:
        return
    if not (math.isfinite(value) and least <= value <= most):
        raise ConfigError(f"{key}={value:g}: must be from {least:g} to {most:g}{unit}")
