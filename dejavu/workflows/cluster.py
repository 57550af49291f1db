"""A cluster for the time of a workflow: store, controller, workers; up together, gone together."""

from __future__ import annotations

import logging
import os
import platform
import secrets
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dejavu.clock import SystemClock
from dejavu.config import Config, StoreConfig, StoreKind
from dejavu.control.member import encode_json
from dejavu.control.plan import Plan
from dejavu.engine.cluster_view import ControllerEntry
from dejavu.engine.mailbox import Mailbox, PeerLost
from dejavu.engine.peers import CONTROLLER, Peers
from dejavu.engine.worker_spec import WorkerSpec
from dejavu.errors import DejavuError
from dejavu.ids import WorkerName
from dejavu.report.logs import tail
from dejavu.report.progress import Progress
from dejavu.serving.cluster_links import ClusterLinks
from dejavu.store.client import StoreClient
from dejavu.store.embedded import EmbeddedEtcd
from dejavu.store.keys import Keys
from dejavu.store.lease import LeaseKeeper
from dejavu.store.spec import StoreSpec
from dejavu.transport.base import Hello, Transport
from dejavu.transport.factory import make_transport
from operators.board import StoreBoard
from operators.loop import ClusterOperator
from operators.processes import WORKER_COMMAND, ProcessLauncher

logger = logging.getLogger(__name__)

_PATIENCE_TTLS = 3.0
_PATIENCE_S = 5.0
_LOG_LINES = 15
_CLOSE_TIMEOUT_S = 3.0
_LOOK_S = 0.2


@dataclass(slots=True)
class Failure:
    """Why the run cannot go on, once known. Written by the operator's thread, read by the controller's."""

    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """A cluster whose workers all serve."""

    links: ClusterLinks
    launcher: ProcessLauncher
    store: StoreSpec
    failure: Failure


@contextmanager
def running_cluster(
    config: Config, plan: Plan, output: Path, progress: Progress, *, worker_command: Sequence[str] = WORKER_COMMAND
) -> Iterator[RunningCluster]:
    """Every worker of the plan serves and is linked to the controller; at the end nothing of the cluster is left.

    Raises DejavuError when a worker dies or cannot start, with the end of its log.
    """
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
        yield StoreSpec(
            endpoints=tuple(config.endpoints),
            ca_cert=config.ca_cert,
            cert=config.cert,
            key=config.key,
            user=config.user,
            password=config.password,
            timeout_s=config.timeout_s,
        )
        return
    with tempfile.TemporaryDirectory(prefix="dejavu-etcd-", ignore_cleanup_errors=True) as folder:
        etcd = EmbeddedEtcd(Path(folder) / "data", fsync=config.fsync, log_path=output / "etcd.log")
        try:
            yield StoreSpec(endpoints=(etcd.endpoint,), timeout_s=config.timeout_s)
        finally:
            etcd.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Desk:
    """The controller's place: where it listens, what it proves itself with, and its claim on the cluster's name."""

    clock: SystemClock
    secret: str
    mailbox: Mailbox
    transport: Transport
    entry: ControllerEntry
    board: StoreBoard


@contextmanager
def _desk(config: Config, plan: Plan, store: StoreSpec) -> Iterator[_Desk]:
    """This process is the cluster's only controller and listens."""
    clock, secret = SystemClock(), secrets.token_hex(16)
    with ExitStack() as stack:
        client = StoreClient(store)
        stack.callback(client.close)
        keeper = LeaseKeeper(store, config.cluster.lease_ttl_s, {})
        stack.callback(keeper.close)
        mailbox = Mailbox(cluster=config.cluster.name, epoch=lambda: plan.epoch, fingerprint=lambda: "")
        transport = make_transport(config.transport.kind.value, secret, config.transport.settings)
        stack.callback(transport.close, _CLOSE_TIMEOUT_S)
        entry = ControllerEntry(
            incarnation=uuid.uuid4().hex[:12],
            host=platform.node(),
            pid=os.getpid(),
            address=transport.listen(mailbox, host=config.cluster.host),
        )
        board = StoreBoard(client, keeper, Keys(config.cluster.name))
        board.claim(entry, clock, lease_ttl_s=config.cluster.lease_ttl_s)
        yield _Desk(clock=clock, secret=secret, mailbox=mailbox, transport=transport, entry=entry, board=board)


@contextmanager
def _on_store(
    config: Config, plan: Plan, output: Path, progress: Progress, store: StoreSpec, worker_command: Sequence[str]
) -> Iterator[RunningCluster]:
    failure, wake = Failure(), threading.Event()
    with ExitStack() as stack:
        desk = stack.enter_context(_desk(config, plan, store))
        launcher = ProcessLauncher(
            lambda name: encode_json(_worker_spec(config, store, desk.secret, name, output)),
            output / "workers",
            num_threads=plan.threads_per_worker,
            on_exit=wake.set,
            command=worker_command,
        )
        operator = _operator(config, plan, desk, launcher, failure, wake)
        # The operator's thread starts the workers, and the kernel ties them to it: it ends after they have.
        stack.callback(operator.stop)
        stack.callback(launcher.stop)
        operator.start()
        _wait_serving(operator, plan, failure, progress, config.cluster.start_timeout_s)
        links = _link(config.cluster.name, plan, operator, desk)
        stack.callback(_part, links, launcher)
        yield RunningCluster(links=links, launcher=launcher, store=store, failure=failure)


def _operator(
    config: Config, plan: Plan, desk: _Desk, launcher: ProcessLauncher, failure: Failure, wake: threading.Event
) -> ClusterOperator:
    def failed(reason: str, worker: WorkerName | None) -> None:
        failure.reason = with_log_tail(reason, worker, launcher)
        desk.mailbox.post(PeerLost(peer=worker or "cluster", reason=reason))

    return ClusterOperator(
        plan=plan,
        spec=encode_json(_declared_state(config)),
        plan_value=encode_json(plan),
        board=desk.board,
        launcher=launcher,
        clock=desk.clock,
        patience_s=_PATIENCE_TTLS * config.cluster.lease_ttl_s + _PATIENCE_S,
        on_failure=failed,
        wake=wake,
    )


def with_log_tail(reason: str, worker: WorkerName | None, launcher: ProcessLauncher) -> str:
    """The reason, and the end of the worker's log where there is one."""
    if worker is None:
        return reason
    log = launcher.log_of(worker)
    end = tail(log, _LOG_LINES)
    return f"{reason}\nits log {log} ends:\n{end}" if end else reason


def _wait_serving(
    operator: ClusterOperator, plan: Plan, failure: Failure, progress: Progress, timeout_s: float
) -> None:
    clock = SystemClock()
    deadline_s = clock.monotonic() + timeout_s
    total = len(plan.workers)
    while not operator.wait_serving(_LOOK_S):
        members = (operator.observed.members if operator.observed is not None else None) or {}
        progress.phase("workers ready", sum(member.state == "serving" for member in members.values()), total)
        if clock.monotonic() > deadline_s:
            late = [name for name in plan.workers if name not in members or members[name].state != "serving"]
            raise DejavuError(f"worker {', '.join(late)} did not serve within cluster.start_timeout_s={timeout_s:g}")
    if failure.reason is not None:
        raise DejavuError(failure.reason)
    progress.phase("workers ready", total, total)


def _link(cluster: str, plan: Plan, operator: ClusterOperator, desk: _Desk) -> ClusterLinks:
    hello = Hello(cluster=cluster, name=CONTROLLER, incarnation=desk.entry.incarnation, epoch=plan.epoch)
    peers = Peers(
        desk.transport,
        hello,
        timeout_s=plan.timeout_s,
        on_failed=lambda peer, reason: desk.mailbox.post(PeerLost(peer=peer, reason=reason)),
    )
    members = (operator.observed.members if operator.observed is not None else None) or {}
    for name in plan.workers:
        peers.connect(name, members[name].address, timeout_s=plan.timeout_s)
    return ClusterLinks(plan, peers, desk.mailbox, desk.clock)


def _part(links: ClusterLinks, launcher: ProcessLauncher) -> None:
    launcher.expect_exits()
    links.stop_workers()
    links.close(_CLOSE_TIMEOUT_S)


def _worker_spec(config: Config, store: StoreSpec, secret: str, name: WorkerName, output: Path) -> WorkerSpec:
    kv_folder = output / "kv" if config.strategy.stream_folder is None else Path(config.strategy.stream_folder)
    return WorkerSpec(
        name=name,
        cluster=config.cluster.name,
        secret=secret,
        store=store,
        host=config.cluster.host,
        lease_ttl_s=config.cluster.lease_ttl_s,
        device=config.cluster.device.value,
        transport_kind=config.transport.kind.value,
        transport_settings=dict(config.transport.settings),
        start_timeout_s=config.cluster.start_timeout_s,
        kv_folder=str((kv_folder / name).absolute()),
    )


def _declared_state(config: Config) -> dict[str, object]:
    """What the user declared, for the store: everything but the credentials of the store itself."""
    return {
        "cluster": config.cluster,
        "model": config.model,
        "strategy": config.strategy,
        "transport": config.transport,
    }
