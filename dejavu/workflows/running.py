"""A cluster that is up, as the controller and a workflow see it: links, repairs, and why it failed if it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dejavu.config import Config
from dejavu.control.journal import RepairJournal, RestoreReceipt
from dejavu.control.member import Member
from dejavu.control.plan import Plan
from dejavu.engine.mailbox import ClusterFenced, ClusterFormed, PeerLost, Wake
from dejavu.engine.peers import CONTROLLER, Peers
from dejavu.ids import Epoch, WorkerName
from dejavu.report.logs import tail
from dejavu.serving.cluster_links import ClusterLinks
from dejavu.store.spec import StoreSpec
from dejavu.transport.base import Hello, TransportError
from dejavu.workflows.desk import Desk
from dejavu.workflows.first_links import Formed
from operators.launcher import Launcher
from operators.loop import ClusterOperator

_LINK_TIMEOUT_S = 5.0
"""Of one worker, which has just said that it serves."""
_LOG_LINES = 15


class RunningCluster:
    """A cluster whose workers all serve; the controller's ``Overseer``.

    Its operator repairs it on a thread of its own, and tells the controller through the mailbox.
    """

    def __init__(self, config: Config, desk: Desk, store: StoreSpec, launcher: Launcher) -> None:
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

    def members(self) -> Mapping[WorkerName, Member] | None:
        """The registered workers as the operator saw them last; None while the store is away. Any thread."""
        observed = None if self._operator is None else self._operator.observed
        return None if observed is None else observed.members

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
        try:
            for name in plan.workers:
                peers.connect(name, addresses[name], timeout_s=min(plan.timeout_s, _LINK_TIMEOUT_S))
        except TransportError:
            peers.abort()
            raise
        self._links = ClusterLinks(plan, peers, desk.mailbox, desk.clock)
        return self._links

    def fenced(self, plan: Plan) -> None:
        """A new plan is in force. On the operator's thread."""
        self._desk.plans.append(plan)
        self._desk.mailbox.post(ClusterFenced(plan=plan))

    def formed(self, plan: Plan, addresses: Mapping[WorkerName, str]) -> None:
        """Every worker of the plan serves. On the operator's thread."""
        self.epochs.formed = (plan, addresses)
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
    formed: Formed | None = None
    """The newest plan whose workers all have served, and where they are."""

    @property
    def newest(self) -> Formed:
        """As ``formed``, once there is one."""
        assert self.formed is not None, "the cluster has not formed yet"
        return self.formed


def with_log_tail(reason: str, worker: WorkerName | None, launcher: Launcher) -> str:
    """The reason, and the end of the worker's log where there is one."""
    if worker is None:
        return reason
    log = launcher.log_of(worker)
    end = tail(log, _LOG_LINES)
    return f"{reason}\nits log {log} ends:\n{end}" if end else reason
