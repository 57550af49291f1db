"""The shape of the section ``simulate``, and what a declaration must satisfy for ``workflow=simulate``. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from dejavu.errors import ConfigError

if TYPE_CHECKING:
    from dejavu.config.schema import Config

MOST_REPLICAS = 1000
_MOST_SPANS = 1_000_000
_MOST_MACHINES = 1000
_MOST_ROWS = 10_000
_MOST_LENGTH = 1_000_000


class CompareOver(Enum):
    """What a comparison shows: the best arrangement by number of machines, or by rows of a microbatch; traces of the
    declared split beside one pipeline of as many machines; or the declared pipeline with and without swapping."""

    machines = "machines"
    microbatches = "microbatches"
    traces = "traces"
    swapping = "swapping"


class CompareCase(Enum):
    """Ways to use the machines: one pipeline; several that share a queue; one for prompts and one for tokens."""

    baseline = "baseline"
    baseline_dp = "baseline_dp"
    disaggregated = "disaggregated"


@dataclass(kw_only=True)
class CompareConfig:
    """Simulated runs beside each other, in one table and figure (DejaVu Fig. 20 to Fig. 26, Fig. 28 to Fig. 31)."""

    over: CompareOver | None = None
    """None: the declared strategy alone is simulated."""
    cases: list[CompareCase] = field(default_factory=lambda: list(CompareCase))
    machines: list[int] = field(default_factory=lambda: [4, 8, 12, 16])
    """Of ``machines``: each number; of ``microbatches``: one number."""
    microbatches: list[int] = field(default_factory=lambda: [8])
    """Rows of a microbatch. Of ``machines``: the best of them is taken; of the others: each number."""
    lengths: list[int] = field(default_factory=list)
    """Of ``swapping``: tokens of a request, prompt (``workload.prompt_tokens``) and answer together."""
    early_stops: list[bool] = field(default_factory=lambda: [True])
    """True: answers as long as the workload says; false: each as long as their mean."""


@dataclass(kw_only=True)
class SimulateConfig:
    """What a simulated run has beside cluster, model, strategy, workload, fault and profile."""

    reference: bool = False
    """Compute as the original project's simulators do: a request is a whole microbatch there."""
    cache_time_ms: float = 0.0
    """Of the reference: added after each prompt stage."""
    replicas: int = 1
    """So many sets of the strategy's pipelines serve out of one queue (data parallelism)."""
    swapping: bool = False
    """Each stage keeps the KV of two microbatches on its device; needs ``cluster.pcie_gbps``."""
    hop_ms: float = 0.0
    """From the end of a pass on one stage until the next stage has it, beside the bytes over ``cluster.link_gbps``."""
    detection_s: float = 0.1
    """From a worker's death until it is known."""
    replacement_s: float = 2.0
    """From then until a new process serves in its place."""
    standby_s: float = 0.1
    """The same with a standby, or with the layers cut anew."""
    failures_per_hour: float = 0.0
    """Kills beside those of ``fault``: a Poisson process over all workers."""
    seed: int = 0
    """Of those."""
    timeline_spans: int = 20_000
    """The first so many pieces of work are in ``timeline.json``; the others are counted."""
    compare: CompareConfig = field(default_factory=CompareConfig)


def check_simulate(config: Config, *, is_simulating: bool) -> None:
    """The section makes sense, or there is none. Raises ConfigError naming key, value and limit."""
    simulate = config.simulate
    if not is_simulating:
        if simulate != SimulateConfig():
            chosen = config.workflow.name.value
            raise ConfigError(f"simulate is for workflow=simulate, and the choice is workflow={chosen}")
        return
    for key in ("cache_time_ms", "hop_ms", "detection_s", "replacement_s", "standby_s", "failures_per_hour"):
        _at_least(f"simulate.{key}", getattr(simulate, key), 0)
    _between("simulate.replicas", simulate.replicas, 1, MOST_REPLICAS)
    _between("simulate.timeline_spans", simulate.timeline_spans, 0, _MOST_SPANS)
    _between("simulate.seed", simulate.seed, 0, 2**63 - 1)
    if simulate.swapping and config.cluster.pcie_gbps is None:
        raise ConfigError("simulate.swapping=true needs cluster.pcie_gbps=GBIT_PER_S, over which KV is swapped")
    if simulate.reference:
        _check_reference(config)
    elif simulate.cache_time_ms:
        raise ConfigError(
            f"simulate.cache_time_ms={simulate.cache_time_ms:g}: is for simulate.reference=true; "
            "otherwise cluster.link_gbps says how long KV takes"
        )
    _check_faults(config)
    _check_machines(config)
    _check_compare(config)


def _check_machines(config: Config) -> None:
    """A number of machines that is not the strategy's would be ignored."""
    wanted, simulate, strategy = config.cluster.num_machines, config.simulate, config.strategy
    needed = strategy.num_workers * simulate.replicas
    if wanted is None or wanted == needed or simulate.compare.over is not None:
        return
    sets = f" in {simulate.replicas} sets" if simulate.replicas > 1 else ""
    raise ConfigError(
        f"cluster.num_machines={wanted}: strategy={strategy.mode.value} is simulated on {needed} machines{sets}\n"
        "give strategy.stages, or strategy.split.prompt and .token, and leave cluster.num_machines out\n"
        "workflow=plan says how to use so many"
    )


def _check_compare(config: Config) -> None:
    compare, key = config.simulate.compare, "simulate.compare"
    if compare.over is None:
        if compare != CompareConfig():
            raise ConfigError(
                f"{key} needs {key}.over=machines, microbatches, traces or swapping; experiment=fig20 sets it"
            )
        return
    for name in ("cases", "machines", "microbatches", "early_stops"):
        listed = getattr(compare, name)
        if not listed or len(set(listed)) < len(listed):
            raise ConfigError(f"{key}.{name}: name at least one, and none twice")
    _between(f"{key}.machines", min(compare.machines), 1, _MOST_MACHINES)
    _between(f"{key}.machines", max(compare.machines), 1, _MOST_MACHINES)
    _between(f"{key}.microbatches", min(compare.microbatches), 1, _MOST_ROWS)
    if compare.over is CompareOver.microbatches and len(compare.machines) > 1:
        raise ConfigError(f"{key}.machines={compare.machines}: {key}.over=microbatches takes one number of machines")
    _check_lengths(config)
    if compare.over is CompareOver.traces and config.strategy.mode.value == "colocated":
        raise ConfigError(f"{key}.over=traces shows strategy=disaggregated beside one pipeline of as many machines")
    if any((config.fault.kill, config.simulate.failures_per_hour, config.simulate.replicas > 1)):
        raise ConfigError(f"{key} compares runs without failures, and finds out how many replicas are best by itself")


def _check_lengths(config: Config) -> None:
    lengths, key = config.simulate.compare.lengths, "simulate.compare.lengths"
    if config.simulate.compare.over is not CompareOver.swapping:
        if lengths:
            raise ConfigError(f"{key}={lengths}: is for simulate.compare.over=swapping")
        return
    if not lengths or sorted(set(lengths)) != lengths:
        raise ConfigError(f"{key}={lengths}: name at least one number of tokens, the shortest first, none twice")
    if config.strategy.mode.value != "colocated" or config.workload.prompt_tokens is None:
        raise ConfigError(
            "simulate.compare.over=swapping needs strategy=colocated, strategy.stages and workload.prompt_tokens\n"
            "experiment=fig28 sets them"
        )
    _between(key, lengths[0], config.workload.prompt_tokens + 1, _MOST_LENGTH)
    _between(key, lengths[-1], config.workload.prompt_tokens + 1, _MOST_LENGTH)
    if config.cluster.pcie_gbps is None:
        raise ConfigError("simulate.compare.over=swapping needs cluster.pcie_gbps=GBIT_PER_S, over which KV is swapped")


def _check_reference(config: Config) -> None:
    """The originals know one set of pipelines, no failures, no links and no swapping."""
    simulate = config.simulate
    alone = SimulateConfig(reference=True, cache_time_ms=simulate.cache_time_ms, timeline_spans=simulate.timeline_spans)
    if simulate != alone:
        raise ConfigError(
            "simulate.reference=true: the original simulators know no replicas, swapping, hops or failures\n"
            "leave those keys of simulate out; only simulate.cache_time_ms goes with it"
        )
    if any((config.fault.kill, config.fault.stop, config.fault.partition, config.fault.slow)):
        raise ConfigError("simulate.reference=true: the original simulators know no failures; leave fault out")
    if simulate.cache_time_ms and config.strategy.mode.value == "colocated":
        raise ConfigError(
            f"simulate.cache_time_ms={simulate.cache_time_ms:g}: KV moves only with strategy=disaggregated"
        )


def _check_faults(config: Config) -> None:
    for kind in ("stop", "partition", "slow"):
        if getattr(config.fault, kind):
            raise ConfigError(f"fault.{kind}: workflow=simulate knows deaths alone; take fault.kill")
    for number, kill in enumerate(config.fault.kill):
        if kill.phase is not None:
            raise ConfigError(f"fault.kill[{number}].phase={kill.phase}: workflow=simulate takes at_s or step")


def _at_least(key: str, value: float, limit: float) -> None:
    if not math.isfinite(value) or value < limit:
        raise ConfigError(f"{key}={value:g}: must be at least {limit:g}")


def _between(key: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{key}={value}: must be from {least} to {most}")
