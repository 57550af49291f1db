"""A cluster for the time of a workflow: store, controller, workers; up together, gone together."""

from __future__ import annotations

import logging
import os
import platform
import secrets
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dejavu.clock import SystemClock
from dejavu.config import Config, StoreConfig, StoreKind
from dejavu.control.journal import RepairJournal, RestoreReceipt
from dejavu.control.member import encode_json
from dejavu.control.plan import Plan
from dejavu.engine.cluster_view import ControllerEntry
from dejavu.engine.mailbox import ClusterFenced, ClusterFormed, Mailbox, PeerLost, Wake
from dejavu.engine.peers import CONTROLLER, Peers
from dejavu.engine.worker_spec import WorkerSpec
from dejavu.errors import DejavuError
from dejavu.ids import Epoch, WorkerName
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

_GB = 10**9
_CONFIRM_S = 1.5
_LINK_TIMEOUT_S = 5.0
"""Of one worker, which has just said that it serves."""
_PATIENCE_TTLS = 3.0
_PATIENCE_S = 5.0
_LOG_LINES = 15
_CLOSE_TIMEOUT_S = 3.0
_LOOK_S = 0.2


class RunningCluster:
    """A cluster whose workers all serve; the controller's ``Overseer``.

    Its operator repairs it on a thread of its own, and tells the controller through the mailbox.
    """

    def __init__(self, config: Config, desk: Desk, store: StoreSpec, launcher: ProcessLauncher) -> None:
        self.store = store
        self.launcher = launcher
        self.epochs = EpochBoard()
        self._config = config
        self._desk = desk
        self._links: ClusterLinks | None = None
        self._operator: ClusterOperator | None = None

    @property
    def links(self) -> ClusterLinks:
        """To the workers of the epoch in force."""
        assert self._links is not None, "the cluster has not formed yet"
        return self._links

    def journals(self) -> tuple[RepairJournal, ...]:
        """Every repair so far, oldest first."""
        return () if self._operator is None else self._operator.journals

    def oversee(self, operator: ClusterOperator) -> None:
        """The operator keeps this cluster."""
        self._operator = operator

    def why_failed(self) -> str | None:
        """See ``Overseer``."""
        return self.epochs.reason

    def suspect(self, worker: str, epoch: Epoch, reason: str) -> None:
        """See ``Overseer``."""
        if self._operator is not None:
            self._operator.suspect(WorkerName(worker), epoch, reason)

    def resumed(self, epoch: Epoch, receipt: RestoreReceipt) -> None:
        """See ``Overseer``."""
        if self._operator is not None:
            self._operator.resumed(epoch, receipt)

    def link(self, plan: Plan, addresses: Mapping[WorkerName, str]) -> ClusterLinks:
        """See ``Overseer``."""
        desk = self._desk
        hello = Hello(
            cluster=self._config.cluster.name, name=CONTROLLER, incarnation=desk.entry.incarnation, epoch=plan.epoch
        )
        peers = Peers(
            desk.transport,
            hello,
            timeout_s=plan.timeout_s,
            on_failed=lambda peer, reason, epoch: desk.mailbox.post(PeerLost(peer=peer, reason=reason, epoch=epoch)),
        )
        for name in plan.workers:
            peers.connect(name, addresses[name], timeout_s=min(plan.timeout_s, _LINK_TIMEOUT_S))
        self._links = ClusterLinks(plan, peers, desk.mailbox, desk.clock)
        return self._links

    def fenced(self, plan: Plan) -> None:
        """A new plan is in force. On the operator's thread."""
        self._desk.plans.append(plan)
        self._desk.mailbox.post(ClusterFenced(plan=plan))

    def formed(self, plan: Plan, addresses: Mapping[WorkerName, str]) -> None:
        """Every worker of the plan serves. On the operator's thread."""
        self.epochs.formed(plan, addresses)
        self._desk.mailbox.post(ClusterFormed(plan=plan, addresses=addresses))

    def failed(self, reason: str, worker: WorkerName | None) -> None:
        """The run cannot go on. On the operator's thread."""
        self.epochs.reason = with_log_tail(reason, worker, self.launcher)
        self._desk.mailbox.post(Wake())


@dataclass(slots=True)
class EpochBoard:
    """What the operator's thread has said; read by others."""

    reason: str | None = None
    """Why the run cannot go on, once known."""
    first: tuple[Plan, Mapping[WorkerName, str]] | None = None
    """The first plan, and where its workers are, once all of them serve."""

    def formed(self, plan: Plan, addresses: Mapping[WorkerName, str]) -> None:
        """An epoch's workers all serve."""
        if self.first is None:
            self.first = (plan, addresses)


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
class Desk:
    """The controller's place: where it listens, what it proves itself with, and its claim on the cluster's name."""

    plans: list[Plan]
    """The last one is in force: messages of another epoch are not taken. The operator's thread appends."""
    clock: SystemClock
    secret: str
    mailbox: Mailbox
    transport: Transport
    entry: ControllerEntry
    board: StoreBoard


@contextmanager
def _desk(config: Config, plan: Plan, store: StoreSpec) -> Iterator[Desk]:
    """This process is the cluster's only controller and listens."""
    clock, secret = SystemClock(), secrets.token_hex(16)
    with ExitStack() as stack:
        client = StoreClient(store)
        stack.callback(client.close)
        keeper = LeaseKeeper(store, config.cluster.lease_ttl_s, {})
        stack.callback(keeper.close)
        in_force = [plan]
        mailbox = Mailbox(cluster=config.cluster.name, epoch=lambda: in_force[-1].epoch, fingerprint=lambda: "")
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
        yield Desk(
            plans=in_force,
            clock=clock,
            secret=secret,
            mailbox=mailbox,
            transport=transport,
            entry=entry,
            board=board,
        )


@contextmanager
def _on_store(
    config: Config, plan: Plan, output: Path, progress: Progress, store: StoreSpec, worker_command: Sequence[str]
) -> Iterator[RunningCluster]:
    wake = threading.Event()
    with ExitStack() as stack:
        desk = stack.enter_context(_desk(config, plan, store))
        launcher = ProcessLauncher(
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
        formed = _wait_formed(operator, plan, cluster.epochs, progress, config.cluster.start_timeout_s)
        cluster.link(*formed)
        stack.callback(_part, cluster)
        yield cluster


def _operator(
    config: Config, plan: Plan, desk: Desk, cluster: RunningCluster, wake: threading.Event
) -> ClusterOperator:
    ttl_s, memory_gb = config.cluster.lease_ttl_s, config.cluster.device_memory_gb
    return ClusterOperator(
        plan=plan,
        spec=encode_json(_declared_state(config)),
        board=desk.board,
        launcher=cluster.launcher,
        clock=desk.clock,
        may_grow=config.strategy.may_grow,
        confirm_s=ttl_s + _CONFIRM_S,
        patience_s=_PATIENCE_TTLS * ttl_s + _PATIENCE_S,
        start_timeout_s=config.cluster.start_timeout_s,
        device_memory_bytes=None if memory_gb is None else int(memory_gb * _GB),
        on_fenced=cluster.fenced,
        on_formed=cluster.formed,
        on_failure=cluster.failed,
        wake=wake,
    )


def with_log_tail(reason: str, worker: WorkerName | None, launcher: ProcessLauncher) -> str:
    """The reason, and the end of the worker's log where there is one."""
    if worker is None:
        return reason
    log = launcher.log_of(worker)
    end = tail(log, _LOG_LINES)
    return f"{reason}\nits log {log} ends:\n{end}" if end else reason


def _wait_formed(
    operator: ClusterOperator, plan: Plan, epochs: EpochBoard, progress: Progress, timeout_s: float
) -> tuple[Plan, Mapping[WorkerName, str]]:
    """The first plan and its workers' addresses. Raises DejavuError when they do not all serve in time."""
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
    if epochs.reason is not None or epochs.first is None:
        raise DejavuError(epochs.reason or "the cluster did not form")
    progress.phase("workers ready", len(names), len(names))
    return epochs.first


def _part(cluster: RunningCluster) -> None:
    cluster.launcher.expect_exits()
    cluster.links.stop_workers()
    cluster.links.close(_CLOSE_TIMEOUT_S)


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
