"""What must be known before a process starts: the model's folder and spec, the plan, the requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dejavu.config import Compute, Config, ModelConfig, StrategyMode
from dejavu.config.strategy import Recovery, StreamTo, Swapping
from dejavu.control.placement import Declared, LayerPairs, check_shape, place
from dejavu.control.plan import Plan, RecoveryTier, StreamTarget
from dejavu.errors import ConfigError
from dejavu.ids import FIRST_EPOCH
from dejavu.kv.levels import StreamingLevel
from dejavu.models.source import ModelSource, cache_folder, has_tokenizer, known_num_layers, resolve
from dejavu.models.spec import ModelSpec, describe
from dejavu.models.tokenizer import TextCodec
from dejavu.planning.rehearsal import rehearsed
from dejavu.planning.shape import shape_of_spec, spec_of_shape
from dejavu.report.progress import Progress, Unit
from dejavu.request import Request
from dejavu.workflows.declared_times import declared_shape, times
from dejavu.workflows.swap_decision import with_swapping
from dejavu.workload import load

_GB = 10**9
_STREAM_TARGETS: Mapping[StreamTo | None, StreamTarget | None] = {
    None: None,
    StreamTo.memory: "memory",
    StreamTo.disk: "disk",
}

_RECOVERY_TIERS: Mapping[Recovery, RecoveryTier] = {
    Recovery.replica: "replica",
    Recovery.recompute: "recompute",
    Recovery.restart: "restart",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that a run needs to know."""

    plan: Plan
    codec: TextCodec | None
    requests: Sequence[Request]


def prepare(config: Config, progress: Progress) -> Prepared:
    """Model, plan and requests are there. Raises ConfigError or InfeasibleError; nothing has been started."""
    model = cluster_model(config, progress)
    codec = codec_of(model)
    requests = load(config.workload, codec=codec, vocab_size=model.vocab_size, avoid=model.eos_token_ids)
    if not requests:
        raise ConfigError(f"workload={config.workload.kind.value} has no request in it")
    plan = place(with_swapping(config, declared(config), model, requests), model, epoch=FIRST_EPOCH)
    return Prepared(plan=plan, codec=codec, requests=requests)


def prepare_service(config: Config, progress: Progress) -> Prepared:
    """Model and plan are there, without requests: they will come. Raises ConfigError or InfeasibleError."""
    model = cluster_model(config, progress)
    plan = place(with_swapping(config, declared(config), model, ()), model, epoch=FIRST_EPOCH)
    return Prepared(plan=plan, codec=codec_of(model), requests=())


def codec_of(model: ModelSpec) -> TextCodec | None:
    """The model's tokenizer, where it has one."""
    folder = Path(model.folder)
    return TextCodec(folder) if model.folder and has_tokenizer(folder) else None


def cluster_model(config: Config, progress: Progress) -> ModelSpec:
    """The model as the cluster's stages have it: itself, or as they rehearse it.

    Raises ConfigError where the declared profile has no times for it.
    """
    model = config.model
    if model.compute is Compute.real:
        return prepare_model(model, progress)
    shape = declared_shape(model) if model.is_shape else None
    spec = prepare_model(model, progress) if shape is None else spec_of_shape(shape)
    rows = config.strategy.microbatch
    is_split = config.strategy.mode is StrategyMode.disaggregated
    return rehearsed(
        spec,
        times(config, shape or shape_of_spec(model.kind, spec), rows.token).costs,
        most_rows=max(rows.prompt, rows.token),
        overhead=config.profile.streaming_overhead or 1.0 if is_split else 1.0,
        time_scale=model.time_scale,
        kv_scale=model.kv_scale,
    )


def worker_memory_bytes(config: Config) -> int | None:
    """What a worker's devices have: one of them where it computes, those of a machine where it rehearses."""
    memory_gb = config.cluster.device_memory_gb
    return None if memory_gb is None else int(memory_gb * _GB) * worker_devices(config)


def worker_devices(config: Config) -> int:
    """Devices of a worker: one where it computes, those of a machine where it rehearses."""
    return config.cluster.devices_per_machine if config.model.compute is Compute.modelled else 1


def host_memory_bytes(config: Config) -> int | None:
    """What a worker's host has for KV that is swapped."""
    return None if config.cluster.host_memory_gb is None else int(config.cluster.host_memory_gb * _GB)


def prepare_model(config: ModelConfig, progress: Progress) -> ModelSpec:
    """The model lies in a local folder (fetched, converted or made once) and is described."""

    def show(description: str, done: int, total: int, unit: Unit) -> None:
        progress.phase(description, done, total or None, unit)

    folder = resolve(model_source(config), cache_folder(), show)
    dtype = None if config.dtype is None else config.dtype.value
    return describe(folder, dtype, config.max_length)


def check_shape_early(config: Config) -> None:
    """Depths and ranges fit the model as far as its layers are known by now. Milliseconds. Raises ConfigError."""
    model = config.model
    num_layers = model.shape.num_layers if model.is_shape else known_num_layers(model_source(model))
    if num_layers is not None and config.strategy.mode is not StrategyMode.auto:
        check_shape(declared(config), num_layers)


def model_source(config: ModelConfig) -> ModelSource:
    """Where the declared model comes from."""
    default = ModelSource(kind=config.kind)
    return ModelSource(
        kind=config.kind,
        path=config.path,
        name=config.name,
        seed=config.seed,
        num_layers=default.num_layers if config.num_layers is None else config.num_layers,
        num_heads=default.num_heads if config.num_heads is None else config.num_heads,
        num_kv_heads=config.num_kv_heads,
    )


def declared(config: Config) -> Declared:
    """The part of the configuration that decides the plan."""
    strategy, cluster = config.strategy, config.cluster
    is_colocated = strategy.mode is StrategyMode.colocated
    return Declared(
        mode="colocated" if is_colocated else "disaggregated",
        prompt_depth=strategy.split.prompt,
        token_depth=strategy.split.token,
        colocated_depth=strategy.stages,
        prompt_layers=_pairs(strategy.layers.colocated if is_colocated else strategy.layers.prompt),
        token_layers=_pairs(strategy.layers.token),
        prompt_rows=strategy.microbatch.prompt,
        prompt_tokens=strategy.microbatch.prompt_tokens,
        token_rows=strategy.microbatch.token,
        in_flight=strategy.in_flight,
        scheduling="row" if strategy.scheduling.name == "row" else "microbatch",
        num_workers=cluster.num_workers,
        device=cluster.device.value,
        threads_per_worker=cluster.threads_per_worker,
        device_memory_bytes=worker_memory_bytes(config),
        host_memory_bytes=host_memory_bytes(config),
        swapping=strategy.swapping is Swapping.on,
        swapping_reason="strategy.swapping=on" if strategy.swapping is Swapping.on else "",
        timeout_s=config.transport.timeout_s,
        streaming=StreamingLevel(strategy.streaming.value),
        stream_to=_STREAM_TARGETS[strategy.stream_to],
        replication=strategy.replication,
        copy_steps=strategy.copy_steps,
        recovery=_RECOVERY_TIERS[strategy.recovery],
        num_standby=strategy.standby,
    )


def _pairs(ranges: list[list[int]] | None) -> LayerPairs | None:
    return None if ranges is None else tuple(tuple(pair) for pair in ranges)  # type: ignore[misc]
