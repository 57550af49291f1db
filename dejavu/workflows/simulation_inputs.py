"""From a declaration to what is simulated: plan, costs, machinery, faults, requests. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from dejavu.config import Config, WorkloadKind
from dejavu.control.memory import Limits, check_memory
from dejavu.control.placement import place
from dejavu.control.plan import Plan
from dejavu.errors import ConfigError
from dejavu.ids import FIRST_EPOCH
from dejavu.models.tokenizer import TextCodec
from dejavu.planning.costs import Costs
from dejavu.planning.shape import ModelShape, spec_of_shape
from dejavu.request import Request
from dejavu.sim.machinery import Machinery
from dejavu.sim.simulation import Setting
from dejavu.workflows.declared_times import times
from dejavu.workflows.injection import faults_of
from dejavu.workflows.plan import model_shape
from dejavu.workflows.preparation import declared
from dejavu.workload import load

_BITS_PER_GIGABYTE_S = 10**9 / 8
_RESIDENT_MICROBATCHES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """All that a simulated run needs."""

    setting: Setting
    requests: Sequence[Request]
    """Those that can be served."""
    refused: Mapping[str, str]


def prepare(config: Config) -> Simulated:
    """The run that the declaration asks for. Raises ConfigError, and InfeasibleError where a stage does not fit."""
    shape, codec = model_shape(config)
    served, refused = sorted_out(requests_of(config, codec, shape.vocab_size), shape.max_length)
    if not served:
        raise ConfigError(f"workload={config.workload.kind.value} has no request in it that can be served")
    return Simulated(setting=setting_of(config, shape, costs_of(config, shape)), requests=served, refused=refused)


def setting_of(config: Config, shape: ModelShape, costs: Costs) -> Setting:
    """The declared cluster. Raises ConfigError, and InfeasibleError where a stage does not fit."""
    simulate = config.simulate
    return Setting(
        plan=plan_of(config, shape),
        replicas=simulate.replicas,
        costs=costs,
        machinery=machinery_of(config),
        faults=faults_of(config.fault),
        failures_per_hour=simulate.failures_per_hour,
        seed=simulate.seed,
        may_grow=config.strategy.may_grow,
        most_spans=simulate.timeline_spans,
    )


def requests_of(config: Config, codec: TextCodec | None, vocab_size: int) -> list[Request]:
    """The declared requests. Of prompts that are drawn only the length is real: their tokens are all the same one."""
    is_drawn = config.workload.kind in (WorkloadKind.synthetic, WorkloadKind.trace)
    requests = load(config.workload, codec=codec, vocab_size=1 if is_drawn else vocab_size)
    prompts: dict[int, tuple[int, ...]] = {}
    return [
        msgspec.structs.replace(
            request,
            prompt_tokens=prompts.setdefault(len(request.prompt_tokens), (0,) * len(request.prompt_tokens)),
        )
        for request in requests
    ]


def sorted_out(requests: Sequence[Request], max_length: int) -> tuple[list[Request], dict[str, str]]:
    """The requests that can be served, and why the others cannot."""
    served: list[Request] = []
    refused: dict[str, str] = {}
    for request in requests:
        length = len(request.prompt_tokens) + request.max_tokens
        if request.refusal is not None:
            refused[request.id] = request.refusal
        elif request.max_tokens < 1:
            refused[request.id] = "the request asks for no token"
        elif length > max_length:
            refused[request.id] = f"{length} positions exceed the model's max_length {max_length}"
        else:
            served.append(request)
    return served, refused


def plan_of(config: Config, shape: ModelShape) -> Plan:
    """The declared strategy's plan. Raises ConfigError, or InfeasibleError where a stage does not fit its machine."""
    memory_bytes = _machine_memory_bytes(config)
    one = replace(declared(config), device_memory_bytes=None, swapping=config.simulate.swapping)
    plan = place(one, spec_of_shape(shape), epoch=FIRST_EPOCH)
    check_memory(plan, Limits(device_bytes=memory_bytes))
    return plan


def costs_of(config: Config, shape: ModelShape) -> Costs:
    """The declared profile."""
    return times(config, shape, config.strategy.microbatch.token).costs


def machinery_of(config: Config) -> Machinery:
    """Links, buses and repairs."""
    cluster, simulate = config.cluster, config.simulate
    return Machinery(
        streaming_overhead=config.profile.streaming_overhead or 1.0,
        link_bytes_per_s=None if cluster.link_gbps is None else cluster.link_gbps * _BITS_PER_GIGABYTE_S,
        pcie_bytes_per_s=None if cluster.pcie_gbps is None else cluster.pcie_gbps * _BITS_PER_GIGABYTE_S,
        is_swapping=simulate.swapping,
        hop_s=simulate.hop_ms / 1e3,
        detection_s=simulate.detection_s,
        replacement_s=simulate.replacement_s,
        standby_s=simulate.standby_s,
    )


def _machine_memory_bytes(config: Config) -> int | None:
    memory_gb = config.cluster.device_memory_gb
    return None if memory_gb is None else int(memory_gb * 10**9) * config.cluster.devices_per_machine
