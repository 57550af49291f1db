"""A cluster for the time of a workflow: store, controller, workers; up together, gone together."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import assert_never

from dejavu.clock import SystemClock
from dejavu.config import Config, Device, LauncherKind, StoreConfig, StoreKind
from dejavu.config.declared import declared_state
from dejavu.control.member import encode_json
from dejavu.control.plan import Plan
from dejavu.engine.worker_spec import WorkerSpec
from dejavu.errors import DejavuError
from dejavu.ids import WorkerName
from dejavu.report.progress import Progress
from dejavu.store.embedded import EmbeddedEtcd
from dejavu.store.keys import Keys
from dejavu.store.spec import StoreSpec
from dejavu.transport.interface import address_of
from dejavu.workflows.desk import CLOSE_TIMEOUT_S, Desk, open_desk
from dejavu.workflows.external_store import external_store
from dejavu.workflows.first_links import link_first
from dejavu.workflows.preparation import host_memory_bytes, worker_memory_bytes
from dejavu.workflows.running import EpochBoard, RunningCluster
from operators.elsewhere import StartedElsewhere
from operators.launcher import Launcher
from operators.loop import ClusterOperator
from operators.processes import ProcessLauncher
from operators.ray_launcher import RayLauncher, import_ray
from operators.worker_process import WORKER_COMMAND

logger = logging.getLogger(__name__)

_CONFIRM_S = 1.5
_PATIENCE_TTLS = 3.0
_PATIENCE_S = 5.0
_LOOK_S = 0.2


@contextmanager
def running_cluster(
    config: Config, plan: Plan, output: Path, progress: Progress, *, worker_command: Sequence[str] = WORKER_COMMAND
) -> Iterator[RunningCluster]:
    """Every worker of the plan serves and is linked to the controller; at the end nothing of the cluster is left.

    Raises DejavuError when a worker dies or cannot start, with the end of its log.
    """
    if config.cluster.launcher is LauncherKind.ray:
        import_ray()
    with ExitStack() as stack:
        store = stack.enter_context(_store(config.store, output))
        endpoints = ",".join(store.endpoints)
        prefix = Keys(config.cluster.name).prefix
        progress.note(f"store: etcdctl --endpoints={endpoints} get --prefix {prefix}")
        yield stack.enter_context(_on_store(config, plan, output, progress, store, worker_command))


@contextmanager
def _store(config: StoreConfig, output: Path) -> Iterator[StoreSpec]:
    """The declared store answers."""
    if config.kind is StoreKind.external:
        yield external_store(config)
        return
    with tempfile.TemporaryDirectory(prefix="dejavu-etcd-", ignore_cleanup_errors=True) as folder:
        etcd = EmbeddedEtcd(Path(folder) / "data", fsync=config.fsync, log_path=output / "etcd.log")
        try:
            yield StoreSpec(endpoints=(etcd.endpoint,), timeout_s=config.timeout_s)
        finally:
            etcd.stop()


@contextmanager
def _on_store(
    config: Config, plan: Plan, output: Path, progress: Progress, store: StoreSpec, worker_command: Sequence[str]
) -> Iterator[RunningCluster]:
    wake = threading.Event()
    with ExitStack() as stack:
        desk = stack.enter_context(open_desk(config, plan, store))
        launcher = _launcher(
            config,
            lambda name: encode_json(_worker_spec(config, store, desk.secret, name, output)),
            output / "workers",
            num_threads=plan.threads_per_worker,
            on_exit=wake.set,
            command=worker_command,
        )
        cluster = RunningCluster(config, desk, store, launcher)
        operator = _operator(config, plan, desk, cluster, wake)
        cluster.oversee(operator)
        # The operator's thread starts the workers, and the kernel ties them to it: it ends after they have.
        stack.callback(operator.stop)
        stack.callback(launcher.stop)
        operator.start()
        timeout_s = config.cluster.start_timeout_s
        _wait_formed(operator, plan, cluster.epochs, progress, timeout_s)
        link_first(lambda: cluster.epochs.newest, cluster, desk.clock, timeout_s=timeout_s)
        stack.callback(_part, cluster)
        yield cluster


def _launcher(
    config: Config,
    spec_of: Callable[[WorkerName], bytes],
    log_folder: Path,
    *,
    num_threads: int,
    on_exit: Callable[[], None],
    command: Sequence[str],
) -> Launcher:
    cluster = config.cluster
    match cluster.launcher:
        case LauncherKind.none:
            return StartedElsewhere(log_folder)
        case LauncherKind.ray:
            return RayLauncher(
                spec_of,
                log_folder.absolute(),
                num_threads=num_threads,
                num_gpus=int(cluster.device is Device.cuda),
                on_exit=on_exit,
                address=cluster.ray_address,
            )
        case LauncherKind.process:
            return ProcessLauncher(spec_of, log_folder, num_threads=num_threads, on_exit=on_exit, command=command)
    assert_never(cluster.launcher)


def _operator(
    config: Config, plan: Plan, desk: Desk, cluster: RunningCluster, wake: threading.Event
) -> ClusterOperator:
    ttl_s = config.cluster.lease_ttl_s
    return ClusterOperator(
        plan=plan,
        spec=encode_json(declared_state(config)),
        board=desk.board,
        launcher=cluster.launcher,
        clock=desk.clock,
        may_grow=config.strategy.may_grow,
        confirm_s=ttl_s + _CONFIRM_S,
        patience_s=_PATIENCE_TTLS * ttl_s + _PATIENCE_S,
        start_timeout_s=config.cluster.start_timeout_s,
        device_memory_bytes=worker_memory_bytes(config),
        host_memory_bytes=host_memory_bytes(config),
        starts_processes=config.cluster.launcher is not LauncherKind.none,
        on_fenced=cluster.fenced,
        on_formed=cluster.formed,
        on_failure=cluster.failed,
        wake=wake,
    )


def _wait_formed(
    operator: ClusterOperator, plan: Plan, epochs: EpochBoard, progress: Progress, timeout_s: float
) -> None:
    """Every worker of the first plan has served. Raises DejavuError when they do not in time."""
    clock = SystemClock()
    deadline_s = clock.monotonic() + timeout_s
    names = (*plan.workers, *plan.standby)
    while not operator.wait_serving(_LOOK_S):
        members = (operator.observed.members if operator.observed is not None else None) or {}
        states = [members[name].state for name in names if name in members]
        progress.phase("workers ready", sum(state in ("serving", "ready") for state in states), len(names))
        if clock.monotonic() > deadline_s:
            late = [name for name in names if name not in members or members[name].state != "serving"]
            raise DejavuError(f"worker {', '.join(late)} did not serve within cluster.start_timeout_s={timeout_s:g}")
    if epochs.reason is not None or epochs.formed is None:
        raise DejavuError(epochs.reason or "the cluster did not form")
    progress.phase("workers ready", len(names), len(names))


def _part(cluster: RunningCluster) -> None:
    cluster.launcher.expect_exits()
    cluster.links.stop_workers()
    cluster.links.close(CLOSE_TIMEOUT_S)


def _worker_spec(config: Config, store: StoreSpec, secret: str, name: WorkerName, output: Path) -> WorkerSpec:
    kv_folder = output / "kv" if config.strategy.stream_folder is None else Path(config.strategy.stream_folder)
    return WorkerSpec(
        name=name,
        cluster=config.cluster.name,
        secret=secret,
        store=store,
        host=address_of(config.cluster.host),
        lease_ttl_s=config.cluster.lease_ttl_s,
        device=config.cluster.device.value,
        transport_kind=config.transport.kind.value,
        transport_settings=dict(config.transport.settings),
        start_timeout_s=config.cluster.start_timeout_s,
        kv_folder=str((kv_folder / name).absolute()),
    )
