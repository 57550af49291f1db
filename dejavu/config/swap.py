"""The shape of the section ``swap``, and what a declaration must satisfy for ``workflow=swapping``. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dejavu.config.bounds import above_zero
from dejavu.config.fault import FaultConfig
from dejavu.config.strategy import Scheduling, StrategyMode, Swapping
from dejavu.errors import ConfigError

if TYPE_CHECKING:
    from dejavu.config.schema import Config

_ADVICE = "experiment=fig13 sets what the measurement needs"
_LEAST_IN_FLIGHT = 4
"""Two swapped microbatches of 2B rows are as many rows as four of B."""


@dataclass(kw_only=True)
class SwapConfig:
    """What ``workflow=swapping`` compares: batch B without swapping, B with it, and 2B with it, in the same memory."""

    models: list[str] = field(default_factory=lambda: ["smollm2-135m", "random-opt-125m"])
    """Kinds of model; the other keys of ``model`` are those of each."""
    batches: list[int] = field(default_factory=lambda: [1, 2, 4])
    """B: rows of a microbatch without swapping. A device's memory is what they need."""
    lengths: list[int] | None = None
    """Tokens of a request, prompt (``workload.prompt_tokens``) and answer together, to show where swapping stops to
    pay; needs ``bus_gbps``. None: ``workload.prompt_tokens`` and ``.max_tokens``."""
    bus_gbps: float | None = None
    """A bus between host memory and slots that is emulated, in Gbit/s: copies that end earlier wait. None: none."""
    repeats: int = 3
    """Rounds; in each, every case runs once, in an order that rotates from round to round."""


def check_swap(config: Config, model_kinds: tuple[str, ...], *, is_measuring: bool) -> None:
    """The measurement is one that can be made, or there is none. Raises ConfigError naming key, value and limit."""
    swap, strategy, workload = config.swap, config.strategy, config.workload
    if not is_measuring:
        if swap != SwapConfig():
            raise ConfigError(f"swap is for workflow=swapping, and the choice is {config.workflow.name.value}")
        return
    unknown = [kind for kind in swap.models if kind not in model_kinds]
    if unknown or not swap.models or len(set(swap.models)) < len(swap.models):
        raise ConfigError(f"swap.models={swap.models}: each must be a kind of model, once\n{_ADVICE}")
    if not swap.batches or min(swap.batches) < 1 or len(set(swap.batches)) < len(swap.batches):
        raise ConfigError(f"swap.batches={swap.batches}: each must be at least 1 row, once")
    _check_lengths(swap, workload.prompt_tokens)
    if swap.repeats < 1:
        raise ConfigError(f"swap.repeats={swap.repeats}: must be at least 1 round")
    if config.fault != FaultConfig():
        raise ConfigError("fault is for workflow=generate and workflow=recovery, and the choice is swapping")
    if workload.kind.value != "synthetic" or not workload.ignore_eos or workload.median_tokens is not None:
        raise ConfigError(f"workflow=swapping needs workload=synthetic with equal answers\n{_ADVICE}")
    if strategy.mode is not StrategyMode.colocated or strategy.scheduling is not Scheduling.microbatch:
        raise ConfigError(f"workflow=swapping needs strategy=colocated strategy.scheduling=microbatch\n{_ADVICE}")
    if strategy.swapping is not Swapping.off:
        raise ConfigError(f"strategy.swapping={strategy.swapping.value}: workflow=swapping sets it for each case")
    if strategy.num_in_flight < _LEAST_IN_FLIGHT:
        raise ConfigError(
            f"strategy.in_flight={strategy.num_in_flight}: at least {_LEAST_IN_FLIGHT}, so that the memory of "
            f"B rows in each of them holds two microbatches of 2B\n{_ADVICE}"
        )
    for key in ("device_memory_gb", "host_memory_gb"):
        if getattr(config.cluster, key) is not None:
            raise ConfigError(f"cluster.{key} does not go with workflow=swapping, which sets what a batch B needs")


def _check_lengths(swap: SwapConfig, prompt_tokens: int | None) -> None:
    above_zero("swap.bus_gbps", swap.bus_gbps, " Gbit/s")
    if swap.lengths is None:
        return
    least = (prompt_tokens or 0) + 2
    if not swap.lengths or min(swap.lengths) < least or len(set(swap.lengths)) < len(swap.lengths):
        raise ConfigError(f"swap.lengths={swap.lengths}: each must be at least {least} tokens, the prompt and 2, once")
    if swap.bus_gbps is None:
        raise ConfigError("swap.lengths needs swap.bus_gbps=GBIT_PER_S: the rule compares steps with a bus")
