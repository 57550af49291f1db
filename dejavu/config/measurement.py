"""What a declaration must satisfy for ``workflow=streaming``, which brings up a cluster after the other. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dejavu.config.fault import FaultConfig
from dejavu.config.schema import (
    MODEL_KINDS,
    Config,
    Figure,
    MeasurementConfig,
    ModelConfig,
    WorkflowName,
    WorkloadConfig,
    WorkloadKind,
)
from dejavu.config.strategy import Scheduling, StrategyConfig, StrategyMode, Streaming
from dejavu.errors import ConfigError, nearest

_ADVICE = "experiment=fig11 and experiment=fig27 set what the measurement needs"


def check_measurement(config: Config) -> None:
    """The measurement is one that can be made, or there is none. Raises ConfigError naming key, value and limit."""
    measurement = config.measurement
    if config.workflow.name is not WorkflowName.streaming:
        if measurement != MeasurementConfig():
            raise ConfigError(f"measurement is for workflow=streaming, and the choice is {config.workflow.name.value}")
        return
    if config.fault != FaultConfig():
        raise ConfigError("fault is for workflow=generate and workflow=recovery, and the choice is streaming")
    _check_lists(measurement)
    _check_figure(measurement)
    _check_model(config.model, measurement.models)
    _check_workload(config.workload, measurement.batches)
    _check_strategy(config.strategy, max(measurement.batches))
    length = (config.workload.prompt_tokens or 0) + (config.workload.max_tokens or 0)
    if config.model.max_length is not None and config.model.max_length < length:
        raise ConfigError(f"model.max_length={config.model.max_length}: prompt and new tokens are {length}")


def _check_lists(measurement: MeasurementConfig) -> None:
    for key in ("models", "destinations", "levels", "batches"):
        values: Sequence[object] = getattr(measurement, key)
        if not values:
            raise ConfigError(f"measurement.{key}=[]: name at least one")
        if len(set(values)) < len(values):
            raise ConfigError(f"measurement.{key} names one twice; measurement.repeats measures again")
    for kind in measurement.models:
        if kind not in MODEL_KINDS:
            raise ConfigError(f"measurement.models={kind}: {nearest(kind, MODEL_KINDS)}")
    if min(measurement.batches) < 1:
        raise ConfigError(f"measurement.batches={min(measurement.batches)}: must be at least 1 row")
    if measurement.repeats < 1:
        raise ConfigError(f"measurement.repeats={measurement.repeats}: must be at least 1 round")


def _check_figure(measurement: MeasurementConfig) -> None:
    figure, batches = measurement.figure, measurement.batches
    needed = (Streaming.off,) if figure is Figure.fig11 else (Streaming.off, Streaming.full)
    for level in needed:
        if level not in measurement.levels:
            raise ConfigError(f"measurement.levels lacks {level.value}, with which {figure.value} compares")
    if figure is Figure.fig11 and len(batches) > 1:
        raise ConfigError(f"measurement.batches={batches}: fig11 compares levels for one batch; fig27 takes several")


def _check_model(model: ModelConfig, kinds: Sequence[str]) -> None:
    # The default cannot be told from no choice; any other model was asked for and would not be measured.
    if model.kind not in (*kinds, ModelConfig().kind):
        raise ConfigError(
            f"model.kind={model.kind}: measurement.models={kinds} is what is measured\n"
            f"add measurement.models=[{model.kind}]"
        )


def _check_workload(workload: WorkloadConfig, batches: Sequence[int]) -> None:
    if workload.kind is not WorkloadKind.synthetic:
        raise ConfigError(f"workload={workload.kind.value}: workflow=streaming needs workload=synthetic\n{_ADVICE}")
    if workload.median_tokens is not None:
        raise ConfigError(f"workload.median_tokens={workload.median_tokens:g}: workflow=streaming needs equal rows")
    if not workload.ignore_eos or workload.rate:
        raise ConfigError("workflow=streaming needs workload.ignore_eos=true and workload.rate=0: equal rows")
    if workload.max_tokens is not None and workload.max_tokens < 2:
        raise ConfigError(f"workload.max_tokens={workload.max_tokens}: the first comes from the prompt; at least 2")
    if workload.num_requests is not None and max(batches) > workload.num_requests:
        raise ConfigError(
            f"measurement.batches={max(batches)}: a batch is the first so many requests, and there are "
            f"{workload.num_requests}\nraise workload.num_requests"
        )


def _check_strategy(strategy: StrategyConfig, rows: int) -> None:
    if strategy.mode is not StrategyMode.colocated or strategy.stages != 1:
        raise ConfigError(f"workflow=streaming measures one stage: strategy=colocated strategy.stages=1\n{_ADVICE}")
    if strategy.stream_to is not None:
        raise ConfigError(f"strategy.stream_to={strategy.stream_to.value}: measurement.destinations decides")
    if strategy.scheduling is not Scheduling.microbatch or strategy.in_flight not in (None, 1):
        raise ConfigError(
            f"workflow=streaming needs strategy.scheduling=microbatch and strategy.in_flight=1: one batch\n{_ADVICE}"
        )
    microbatch = strategy.microbatch
    if microbatch.prompt < rows or microbatch.token < rows or microbatch.prompt_tokens is not None:
        raise ConfigError(
            f"workflow=streaming needs strategy.microbatch.prompt and .token of at least {rows} rows, "
            f"and .prompt_tokens=null: one batch\n{_ADVICE}"
        )
