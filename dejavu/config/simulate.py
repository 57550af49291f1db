"""The shape of the section ``simulate``, and what a declaration must satisfy for ``workflow=simulate``. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dejavu.errors import ConfigError

if TYPE_CHECKING:
    from dejavu.config.schema import Config

_MOST_REPLICAS = 1000
_MOST_SPANS = 1_000_000


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
    _between("simulate.replicas", simulate.replicas, 1, _MOST_REPLICAS)
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
