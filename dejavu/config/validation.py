"""What a declaration must satisfy before anything starts. Pure: reads no file, imports no model code.

Layers against depths are checked by the placement, which knows the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from dejavu.config.apply import check_apply
from dejavu.config.bench import check_bench
from dejavu.config.bounds import above_zero, at_least, check_seed, refuse
from dejavu.config.cluster import ClusterConfig, LauncherKind
from dejavu.config.comparison import check_comparison
from dejavu.config.fault import FaultConfig
from dejavu.config.fault_check import check_faults
from dejavu.config.measurement import check_measurement
from dejavu.config.planning_check import PLANNING, check_planning
from dejavu.config.rates import check_rates
from dejavu.config.rehearsal import check_rehearsal
from dejavu.config.schema import (
    MODEL_KINDS,
    Config,
    ModelConfig,
    StoreConfig,
    StoreKind,
    TransportConfig,
    WorkflowName,
)
from dejavu.config.serve import check_serve
from dejavu.config.simulate import MOST_REPLICAS, check_simulate
from dejavu.config.status import check_status
from dejavu.config.strategy import StrategyConfig, StrategyMode, Streaming, StreamTo
from dejavu.config.swap import check_swap
from dejavu.config.swapping_check import check_swapping
from dejavu.config.workload_check import check_workload
from dejavu.errors import ConfigError, nearest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ENDPOINT = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_HUB_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?")
_SECRET = re.compile(r"[!-~]{16,}")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")


def validate(config: Config) -> None:
    """``config`` makes sense by itself. Raises ConfigError naming key, value and limit of the first fault."""
    is_applying = config.workflow.name is WorkflowName.apply
    check_apply(config, is_applying=is_applying, is_external=config.store.kind is StoreKind.external)
    _check_cluster(config.cluster)
    if is_applying:
        # What is given makes sense only beside what the running cluster has.
        _check_store(config.store)
        return
    _check_model(config.model)
    check_strategy(config.strategy)
    check_num_workers(config.cluster, config.strategy)
    _check_transport(config.transport)
    check_workload(config.workload, least_new_tokens=0 if config.workflow.name in PLANNING else 1)
    _check_store(config.store)
    check_faults(config.fault, config.strategy, replicas=min(max(1, config.simulate.replicas), MOST_REPLICAS))
    if config.cluster.launcher is LauncherKind.none and config.fault != FaultConfig():
        raise ConfigError("fault acts on workers that this run starts, and cluster.launcher=none starts none")
    if config.cluster.launcher is LauncherKind.ray:
        _check_ray(config)
    check_measurement(config)
    check_comparison(config)
    check_swapping(config)
    check_swap(config, MODEL_KINDS, is_measuring=config.workflow.name is WorkflowName.swapping)
    check_planning(config)
    check_rehearsal(config)
    check_rates(config, is_comparing=config.workflow.name is WorkflowName.rates)
    check_status(config)
    check_serve(config, is_serving=config.workflow.name is WorkflowName.serve)
    check_bench(config, is_benching=config.workflow.name is WorkflowName.bench)
    check_simulate(config, is_simulating=config.workflow.name is WorkflowName.simulate)


def _check_cluster(cluster: ClusterConfig) -> None:
    if not _NAME.fullmatch(cluster.name):
        raise refuse(
            "cluster.name", cluster.name, "letters, digits, '.', '_' and '-' only, beginning with one of the first two"
        )
    if not cluster.host or re.search(r"[\s/:]", cluster.host):
        raise refuse(
            "cluster.host", repr(cluster.host), "must be an IPv4 address, an interface or a host name, without a port"
        )
    if cluster.secret is not None and not _SECRET.fullmatch(cluster.secret):
        raise ConfigError("cluster.secret must be at least 16 visible ASCII characters without spaces")
    if cluster.launcher is LauncherKind.none and cluster.secret is None:
        raise ConfigError(
            "cluster.launcher=none needs a secret that workers started elsewhere know\n"
            "give DEJAVU_CLUSTER_SECRET in the environment, here and there"
        )
    at_least("cluster.num_workers", cluster.num_workers, 1)
    at_least("cluster.threads_per_worker", cluster.threads_per_worker, 1)
    above_zero("cluster.device_memory_gb", cluster.device_memory_gb, " GB")
    above_zero("cluster.host_memory_gb", cluster.host_memory_gb, " GB")
    at_least("cluster.lease_ttl_s", cluster.lease_ttl_s, 2, " s")
    above_zero("cluster.start_timeout_s", cluster.start_timeout_s, " s")


def _check_ray(config: Config) -> None:
    """Workers on other nodes can reach the store and the controller."""
    if config.store.kind is StoreKind.embedded:
        raise ConfigError("cluster.launcher=ray needs store=external: other nodes cannot reach the store of this run")
    if config.cluster.host in ("127.0.0.1", "localhost"):
        raise refuse(
            "cluster.host", config.cluster.host, "workers on other nodes cannot reach it; name an address or interface"
        )


def _check_model(model: ModelConfig) -> None:
    if model.kind not in MODEL_KINDS:
        raise refuse("model.kind", model.kind, nearest(model.kind, MODEL_KINDS))
    _needed_by("model", "path", model.path, model.kind, "local", "FOLDER")
    _needed_by("model", "name", model.name, model.kind, "hub", "OWNER/NAME")
    if model.name is not None and not _HUB_NAME.fullmatch(model.name):
        raise refuse(
            "model.name",
            model.name,
            "must be a hub id such as OWNER/NAME; for a folder take model=local model.path=FOLDER",
        )
    tiny = model.kind.startswith("tiny-")
    for key in ("num_layers", "num_heads", "num_kv_heads"):
        value = getattr(model, key)
        if value is not None and not tiny:
            raise refuse(f"model.{key}", value, f"is for the tiny models; model={model.kind} has its own")
        at_least(f"model.{key}", value, 1)
    _check_heads(model)
    at_least("model.max_length", model.max_length, 2, " positions")
    check_seed("model.seed", model.seed)


def _check_heads(model: ModelConfig) -> None:
    if model.num_heads and model.num_kv_heads and model.num_heads % model.num_kv_heads:
        raise refuse("model.num_kv_heads", model.num_kv_heads, f"must divide model.num_heads={model.num_heads}")


def _needed_by(group: str, key: str, value: str | None, kind: str, needing: str, example: str) -> None:
    """Raises ConfigError unless ``value`` is given exactly when the group's option is ``needing``."""
    if kind == needing and not value:
        raise ConfigError(f"{group}={kind} needs {group}.{key}={example}")
    if kind != needing and value is not None:
        raise refuse(f"{group}.{key}", value, f"is for {group}={needing}, and the choice is {group}={kind}")


def check_strategy(strategy: StrategyConfig) -> None:
    """The strategy makes sense by itself. Raises ConfigError."""
    at_least("strategy.split.prompt", strategy.split.prompt, 1, " stage")
    at_least("strategy.split.token", strategy.split.token, 1, " stage")
    at_least("strategy.stages", strategy.stages, 1, " stage")
    at_least("strategy.microbatch.prompt", strategy.microbatch.prompt, 1, " row")
    at_least("strategy.microbatch.prompt_tokens", strategy.microbatch.prompt_tokens, 1, " token")
    at_least("strategy.microbatch.token", strategy.microbatch.token, 1, " row")
    at_least("strategy.in_flight", strategy.in_flight, 1, " microbatch")
    if strategy.mode is StrategyMode.auto:
        _check_auto(strategy)
    elif strategy.mode is StrategyMode.colocated:
        for key, depth in (("prompt", strategy.split.prompt), ("token", strategy.split.token)):
            if depth != 1:
                raise refuse(
                    f"strategy.split.{key}", depth, "is for strategy=disaggregated; colocated takes strategy.stages"
                )
    elif strategy.stages != 1:
        raise refuse(
            "strategy.stages",
            strategy.stages,
            "is for strategy=colocated; disaggregated takes strategy.split.prompt and .token",
        )
    for kind in ("prompt", "token", "colocated"):
        _check_layers(strategy, kind)
    _check_streaming(strategy)
    _check_replication(strategy)


def _check_auto(strategy: StrategyConfig) -> None:
    """Nothing is fixed that the planner is to choose, or that hangs on its choice."""
    default = StrategyConfig()
    for key in ("split", "stages", "in_flight", "replication", "standby"):
        value = getattr(strategy, key)
        if value != getattr(default, key):
            raise ConfigError(f"strategy.{key} does not go with strategy=auto, which chooses the pipelines itself")
    if strategy.stream_to is StreamTo.memory:
        raise ConfigError(
            "strategy.stream_to=memory takes a worker of its own, and strategy=auto plans with all of them"
        )


def _check_streaming(strategy: StrategyConfig) -> None:
    if strategy.streaming is Streaming.off and strategy.mode is not StrategyMode.colocated:
        raise refuse(
            "strategy.streaming",
            "off",
            "a disaggregated strategy streams KV from its prompt stages to its token stages\n"
            "take naive, buffered, layerwise or full, or strategy=colocated",
        )
    if strategy.stream_folder is not None and strategy.stream_to is not StreamTo.disk:
        raise refuse("strategy.stream_folder", strategy.stream_folder, "is for strategy.stream_to=disk")


def _check_replication(strategy: StrategyConfig) -> None:
    k, depth = strategy.replication, strategy.ring_depth
    if not 0 <= k < depth:
        key = "strategy.stages" if strategy.mode is StrategyMode.colocated else "strategy.split.token"
        raise refuse(
            "strategy.replication",
            k,
            f"must be from 0 to {depth - 1}: a stage's copies lie on so many of the others, and {key}={depth}",
        )
    if k and strategy.streaming is Streaming.off:
        raise refuse("strategy.streaming", "off", f"and strategy.replication={k} streams KV to successors")
    at_least("strategy.copy_steps", strategy.copy_steps, 1, " steps")
    at_least("strategy.standby", strategy.standby, 0, " workers")


def _check_layers(strategy: StrategyConfig, kind: str) -> None:
    ranges: list[list[int]] | None = getattr(strategy.layers, kind)
    if ranges is None:
        return
    key = f"strategy.layers.{kind}"
    depth = strategy.depths.get(kind)
    if depth is None:
        raise refuse(key, ranges, f"strategy={strategy.mode.value} has no {kind} pipeline")
    if len(ranges) != depth:
        raise refuse(key, ranges, f"{len(ranges)} ranges for {depth} stages")
    expected = 0
    for pair in ranges:
        if len(pair) != 2 or pair[0] != expected or pair[1] <= pair[0]:
            raise refuse(
                key,
                ranges,
                f"{pair} must be [{expected}, b] with b > {expected}: ranges are [a, b), in order, without gaps",
            )
        expected = pair[1]


def check_num_workers(cluster: ClusterConfig, strategy: StrategyConfig) -> None:
    """The strategy needs no more workers than there are. Raises ConfigError."""
    needed = strategy.num_workers
    if cluster.num_workers is not None and cluster.num_workers < needed:
        standby = {"standby": strategy.standby} if strategy.standby else {}
        parts = " + ".join(f"{depth} {kind}" for kind, depth in {**strategy.depths, **standby}.items())
        raise refuse(
            "cluster.num_workers",
            cluster.num_workers,
            f"strategy={strategy.mode.value} needs {needed} workers ({parts})\nraise it to {needed}, or leave it out",
        )


def _check_transport(transport: TransportConfig) -> None:
    for variable in transport.settings:
        if not _VARIABLE.fullmatch(variable):
            raise refuse(
                f"transport.settings.{variable}",
                transport.settings[variable],
                "must be an environment variable such as UCX_NET_DEVICES",
            )
    above_zero("transport.timeout_s", transport.timeout_s, " s")


def _check_store(store: StoreConfig) -> None:
    above_zero("store.timeout_s", store.timeout_s, " s")
    checks: dict[StoreKind, Callable[[StoreConfig], None]] = {
        StoreKind.embedded: _check_embedded_store,
        StoreKind.external: _check_external_store,
    }
    checks[store.kind](store)


def _check_embedded_store(store: StoreConfig) -> None:
    for key in ("endpoints", "ca_cert", "cert", "key", "user", "password"):
        if getattr(store, key):
            raise ConfigError(f"store.{key} is for store=external, and the choice is store=embedded")


def _check_external_store(store: StoreConfig) -> None:
    if not store.endpoints:
        raise ConfigError("store=external needs store.endpoints=[HOST:PORT,...]")
    for endpoint in store.endpoints:
        match = _ENDPOINT.fullmatch(endpoint)
        if match is None or not 0 < int(match.group(2)) < 65536:
            raise refuse("store.endpoints", endpoint, "must be HOST:PORT, without http:// or a path")
    if (store.cert is None) != (store.key is None):
        raise ConfigError("store.cert and store.key go together: give both or neither")
    if store.cert is not None and store.ca_cert is None:
        raise ConfigError("store.cert is given without store.ca_cert, and TLS needs the authority's certificate")
    if (store.user is None) != (store.password is None):
        raise ConfigError(
            "store.user and store.password go together: give both or neither\n"
            "the password is best given as DEJAVU_STORE_PASSWORD in the environment"
        )
