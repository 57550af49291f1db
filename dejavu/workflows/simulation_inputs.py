"""From a declaration to what is simulated: plan, costs, machinery, faults, requests. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from dejavu.config import Config, WorkloadKind
from dejavu.control.placement import Declared, check_memory, place
from dejavu.control.plan import Plan
from dejavu.errors import ConfigError
from dejavu.ids import Epoch
from dejavu.models.spec import ModelSpec
from dejavu.models.tokenizer import TextCodec
from dejavu.planning.costs import Costs
from dejavu.planning.shape import ModelShape
from dejavu.request import Request
from dejavu.sim.machinery import Machinery
from dejavu.sim.simulation import Setting
from dejavu.workflows.injection import faults_of
from dejavu.workflows.plan import model_shape, times
from dejavu.workflows.preparation import declared
from dejavu.workload import load

_BITS_PER_GIGABYTE_S = 10**9 / 8
_FIRST_EPOCH = Epoch(1)
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
    plan = place(_unchecked(declared(config)), spec_of(shape), epoch=_FIRST_EPOCH)
    if memory_bytes is not None:
        check_memory(_resident(plan) if config.simulate.swapping else plan, memory_bytes)
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


def spec_of(shape: ModelShape) -> ModelSpec:
    """The model as plans know it; it lies nowhere."""
    return ModelSpec(
        folder="",
        family=shape.name,
        dtype=shape.dtype,
        max_length=shape.max_length,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        eos_token_ids=(),
        model_hash="",
        layer_parameters=shape.layer_parameters,
        embedding_parameters=shape.embedding_parameters,
        head_parameters=shape.head_parameters,
    )


def _unchecked(one: Declared) -> Declared:
    return replace(one, device_memory_bytes=None)


def _resident(plan: Plan) -> Plan:
    """The plan with no more microbatches than swapping leaves on the device."""
    pipelines = tuple(
        msgspec.structs.replace(pipeline, in_flight=min(pipeline.in_flight, _RESIDENT_MICROBATCHES))
        for pipeline in plan.pipelines
    )
    return msgspec.structs.replace(plan, pipelines=pipelines)


def _machine_memory_bytes(config: Config) -> int | None:
    memory_gb = config.cluster.device_memory_gb
    return None if memory_gb is None else int(memory_gb * 10**9) * config.cluster.devices_per_machine
