"""From what the user declares to a plan: which worker takes which layers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dejavu.control.layers import balanced_layers, explicit_layers
from dejavu.control.memory import Limits, check_memory
from dejavu.control.plan import (
    Mode,
    Pipeline,
    PipelineKind,
    Plan,
    RecoveryTier,
    Scheduling,
    Stage,
    StreamTarget,
)
from dejavu.errors import ConfigError
from dejavu.ids import Epoch, WorkerName
from dejavu.kv.layout import LayerRange
from dejavu.kv.levels import StreamingLevel
from dejavu.models.spec import ModelSpec

_COLOCATED_HEAD_SHARE = 0.25
"""Part of the head's weight that counts when a colocated pipeline is cut: tokens pay for it at every step, prompts
once, and both share the stages."""

LayerPairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """The part of the user's declaration that decides the plan. Depths of the other mode are ignored."""

    mode: Mode
    prompt_depth: int = 1
    token_depth: int = 1
    colocated_depth: int = 1
    prompt_layers: LayerPairs | None = None
    """Explicit ranges [a, b) of the prompt (or colocated) pipeline; None: cut evenly."""
    token_layers: LayerPairs | None = None
    prompt_rows: int
    prompt_tokens: int | None = None
    token_rows: int
    in_flight: int | None = None
    """Token microbatches under way; None: see ``num_in_flight``."""
    scheduling: Scheduling
    num_workers: int | None = None
    """Workers the user gives; None: as many as the strategy needs."""
    device: str = "cpu"
    threads_per_worker: int = 1
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    timeout_s: float = 60.0
    streaming: StreamingLevel = StreamingLevel.full
    stream_to: StreamTarget | None = None
    replication: int = 0
    copy_steps: int = 1
    swapping: bool = False
    swapping_reason: str = ""
    bus_bytes_per_s: float | None = None
    recovery: RecoveryTier = "replica"
    num_standby: int = 0
    """Workers without a place, named after those that have one."""

    @property
    def limits(self) -> Limits:
        """The memory of a worker."""
        return Limits(device_bytes=self.device_memory_bytes, host_bytes=self.host_memory_bytes)

    @property
    def depths(self) -> tuple[tuple[PipelineKind, int], ...]:
        """The pipelines of the mode and their stages."""
        memory: tuple[tuple[PipelineKind, int], ...] = (("memory", 1),) if self.stream_to == "memory" else ()
        if self.mode == "colocated":
            return (("colocated", self.colocated_depth), *memory)
        return (("prompt", self.prompt_depth), ("token", self.token_depth), *memory)

    @property
    def num_needed(self) -> int:
        """Workers that the strategy gives a place."""
        return sum(depth for _, depth in self.depths)

    @property
    def ring_depth(self) -> int:
        """Stages of the pipeline that keeps rows."""
        return self.colocated_depth if self.mode == "colocated" else self.token_depth

    @property
    def num_in_flight(self) -> int:
        """As declared; else one for each stage that makes tokens; of a split whose microbatches are replaced whole, for
        each stage of both pipelines: a place that waits for its prompts has no tokens to make."""
        if self.in_flight is not None:
            return self.in_flight
        if self.mode == "disaggregated" and self.scheduling == "microbatch":
            return self.prompt_depth + self.token_depth
        return self.ring_depth


def place(declared: Declared, model: ModelSpec, *, epoch: Epoch) -> Plan:
    """The plan for the declared strategy.

    Raises:
        ConfigError: depths, ranges or worker counts that contradict each other or the model; both numbers named.
        InfeasibleError: a stage does not fit the declared memory; bytes named.
    """
    _check_workers(declared)
    _check_replication(declared)
    plan = Plan(
        epoch=epoch,
        mode=declared.mode,
        pipelines=_pipelines(declared, model),
        model=model,
        prompt_rows=declared.prompt_rows,
        prompt_tokens=declared.prompt_tokens,
        scheduling=declared.scheduling,
        device=declared.device,
        threads_per_worker=declared.threads_per_worker,
        timeout_s=declared.timeout_s,
        streaming=declared.streaming,
        stream_to=declared.stream_to,
        replication=declared.replication,
        copy_steps=declared.copy_steps,
        swapping=declared.swapping,
        swapping_reason=declared.swapping_reason,
        bus_bytes_per_s=declared.bus_bytes_per_s,
        recovery=declared.recovery,
        standby=tuple(WorkerName(f"w{declared.num_needed + number}") for number in range(declared.num_standby)),
    )
    check_memory(plan, declared.limits)
    return plan


def check_shape(declared: Declared, num_layers: int) -> None:
    """Workers, depths and explicit ranges fit each other and a model of so many layers. Raises ConfigError."""
    _check_workers(declared)
    _check_replication(declared)
    for kind, depth in declared.depths:
        if kind == "memory":
            continue
        _cut(declared, num_layers, kind, depth, 0.0)


def last_extra(kind: PipelineKind, model: ModelSpec) -> float:
    """Work of the last stage beside its layers, in layers, when a pipeline of that kind is cut."""
    head_layers = model.head_parameters / max(model.layer_parameters, 1)
    return {"prompt": 0.0, "token": head_layers, "colocated": head_layers * _COLOCATED_HEAD_SHARE, "memory": 0.0}[kind]


def _check_workers(declared: Declared) -> None:
    needed = declared.num_needed + declared.num_standby
    if declared.num_workers is not None and declared.num_workers < needed:
        parts = (
            f"strategy.stages={declared.colocated_depth}"
            if declared.mode == "colocated"
            else f"strategy.split.prompt={declared.prompt_depth} and strategy.split.token={declared.token_depth}"
        )
        if declared.stream_to == "memory":
            parts += " and one for strategy.stream_to=memory"
        if declared.num_standby:
            parts += f" and strategy.standby={declared.num_standby}"
        raise ConfigError(
            f"{parts} need {needed} workers, but cluster.num_workers={declared.num_workers}; "
            f"give at least {needed} or make the pipelines shorter"
        )


def _check_replication(declared: Declared) -> None:
    if not 0 <= declared.replication < declared.ring_depth:
        raise ConfigError(
            f"strategy.replication={declared.replication}: must be from 0 to {declared.ring_depth - 1}, "
            f"for a pipeline of {declared.ring_depth}"
        )


def _pipelines(declared: Declared, model: ModelSpec) -> tuple[Pipeline, ...]:
    memory: tuple[Pipeline, ...] = ()
    if declared.stream_to == "memory":
        memory = (_memory(declared, model, declared.num_needed - 1),)
    if declared.mode == "colocated":
        return (_pipeline(declared, model, "colocated", declared.colocated_depth, 0), *memory)
    return (
        _pipeline(declared, model, "prompt", declared.prompt_depth, 0),
        _pipeline(declared, model, "token", declared.token_depth, declared.prompt_depth),
        *memory,
    )


def _memory(declared: Declared, model: ModelSpec, worker: int) -> Pipeline:
    """One stage that can hold a copy of every row of the token stages."""
    return Pipeline(
        kind="memory",
        stages=(Stage(worker=WorkerName(f"w{worker}"), index=0, layers=LayerRange(0, model.num_layers)),),
        microbatch_rows=declared.token_rows,
        in_flight=declared.num_in_flight,
    )


def _pipeline(declared: Declared, model: ModelSpec, kind: PipelineKind, depth: int, first_worker: int) -> Pipeline:
    ranges = _cut(declared, model.num_layers, kind, depth, last_extra(kind, model))
    in_flight = 1 if kind == "prompt" else declared.num_in_flight
    return Pipeline(
        kind=kind,
        stages=tuple(
            Stage(worker=WorkerName(f"w{first_worker + index}"), index=index, layers=layers)
            for index, layers in enumerate(ranges)
        ),
        microbatch_rows=declared.prompt_rows if kind == "prompt" else declared.token_rows,
        in_flight=in_flight,
    )


def _cut(declared: Declared, num_layers: int, kind: PipelineKind, depth: int, extra: float) -> tuple[LayerRange, ...]:
    key = {"prompt": "strategy.split.prompt", "token": "strategy.split.token", "colocated": "strategy.stages"}[kind]
    subject = f"{key}={depth}"
    explicit = declared.token_layers if kind == "token" else declared.prompt_layers
    if explicit is not None:
        return explicit_layers(explicit, num_layers, depth, subject)
    return balanced_layers(num_layers, depth, last_extra=extra, subject=subject)
