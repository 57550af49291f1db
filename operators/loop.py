"""The loop that keeps a cluster equal to its declaration: observe, decide, act, record. Level-triggered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Protocol, assert_never

from dejavu.clock import Clock
from dejavu.control.journal import RepairJournal, RestoreReceipt
from dejavu.control.member import encode_json
from dejavu.control.plan import Plan
from dejavu.errors import DejavuError
from dejavu.ids import Epoch, WorkerName
from operators import changes, journals, placement, recovery, status
from operators.actions import (
    Action,
    DropChange,
    DropJournal,
    FailRun,
    KillWorker,
    PutChange,
    PutJournal,
    PutPlan,
    PutSpec,
    PutStatus,
    Say,
    StartWorker,
    TellFenced,
    TellFormed,
)
from operators.detection import Suspicion
from operators.launcher import Launcher
from operators.observation import Moment, Observed
from operators.repair_state import RepairState, Rules

logger = logging.getLogger(__name__)

_STARTING_PAUSE_S = 0.1
_SERVING_PAUSE_S = 0.25
"""Short, so that the end of a lease is seen soon."""
_HURRIED_PAUSE_S = 0.03

Change = Callable[[RepairState], RepairState]


class Board(Protocol):
    """The cluster's keys in the store, as the loop reads and writes them. Nothing here raises for an outage."""

    def observe(self, launcher: Launcher) -> Observed:
        """One look; members are None while the store cannot be read."""

    def put_spec(self, previous: bytes | None, value: bytes) -> None: ...

    def put_plan_if(self, previous: bytes | None, value: bytes) -> bool | None:
        """True: in; False: the store had something else than ``previous``; None: unknown."""

    def put_journal(self, number: int, value: bytes) -> None: ...

    def drop_journal(self, number: int) -> None: ...

    def put_change(self, revision: int, value: bytes) -> None: ...

    def drop_change(self, revision: int) -> None: ...

    def put_status(self, value: bytes) -> None: ...


class ClusterOperator:
    """Runs ``one_pass`` until stopped, on a thread of its own; a pass can be called alone.

    Callbacks come on the operator's thread; they must not block or raise.

    Args:
        plan: of the first epoch.
        spec: the declared state, as the store is to hold it; a newer revision that is found there is taken up.
        may_grow: a dead worker's place may be taken by a new process; else the others share its layers.
        confirm_s: how long a suspicion waits for the exit or the end of the lease that explains it: TTL + 1.5 s.
        patience_s: how long workers may be missed that a wiped or restarted store has lost.
        start_timeout_s: how long a worker may take to serve in a new epoch before it counts as failed.
        starts_processes: whether the launcher starts anybody; else who is missed is told in the log.
        device_memory_bytes: what a worker's device has, for a plan that is cut anew; None: not checked.
        host_memory_bytes: what its host has for KV that is swapped; None: not checked.
        on_fenced: told once of each new plan, when it is in force.
        on_formed: told once of each epoch (the first one, too), when every worker serves in it, and where.
        on_failure: told once why the run cannot go on.
        on_journal: told of every change of a repair's journal.
        wake: set by whoever knows that something has happened, such as the launcher.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        spec: bytes,
        board: Board,
        launcher: Launcher,
        clock: Clock,
        may_grow: bool,
        confirm_s: float,
        patience_s: float,
        start_timeout_s: float,
        on_fenced: Callable[[Plan], None],
        on_formed: Callable[[Plan, Mapping[WorkerName, str]], None],
        on_failure: Callable[[str, WorkerName | None], None],
        on_journal: Callable[[RepairJournal], None] = lambda journal: None,
        device_memory_bytes: int | None = None,
        host_memory_bytes: int | None = None,
        starts_processes: bool = True,
        wake: threading.Event | None = None,
    ) -> None:
        self._state = RepairState(plan=plan, spec=spec)
        self._rules = Rules(
            may_grow=may_grow,
            confirm_s=confirm_s,
            patience_s=patience_s,
            start_timeout_s=start_timeout_s,
            starts_processes=starts_processes,
            device_memory_bytes=device_memory_bytes,
            host_memory_bytes=host_memory_bytes,
        )
        self._board = board
        self._launcher = launcher
        self._clock = clock
        self._on_fenced = on_fenced
        self._on_formed = on_formed
        self._on_failure = on_failure
        self._on_journal = on_journal
        self._conditions: status.Conditions = {}
        self._changes: SimpleQueue[Change] = SimpleQueue()
        self._observed: Observed | None = None
        self._has_failed = False
        self._is_stopped = False
        self._wake = wake or threading.Event()
        self._serving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="operator", daemon=True)

    def start(self) -> None:
        """The loop runs."""
        self._thread.start()

    def wake(self) -> None:
        """Something happened: the next pass comes at once. Any thread."""
        self._wake.set()

    def suspect(self, worker: WorkerName, epoch: Epoch, reason: str, by: str = "the controller") -> None:
        """A link to the worker broke in this epoch; the operator finds out whether it lives. Any thread."""
        suspicion = Suspicion(worker=worker, epoch=epoch, reason=reason, by=by, since_s=self._clock.monotonic())
        self._changes.put(lambda state: recovery.suspected(state, suspicion))
        self._wake.set()

    def resumed(self, epoch: Epoch, receipt: RestoreReceipt) -> None:
        """The controller's rows go on in this epoch: its repair is done, unless the epoch was left. Any thread."""
        self._changes.put(lambda state: changes.resumed(recovery.resumed(state, epoch, receipt), epoch, receipt))
        self._wake.set()

    def wait_serving(self, timeout_s: float) -> bool:
        """True once every worker serves for the first time or the run has failed; False at the timeout."""
        return self._serving.wait(timeout_s)

    @property
    def observed(self) -> Observed | None:
        """The last look."""
        return self._observed

    @property
    def plan(self) -> Plan:
        """The plan in force. Any thread."""
        return self._state.plan

    @property
    def journals(self) -> tuple[RepairJournal, ...]:
        """Every repair so far, oldest first; the last one may be going on. Any thread."""
        return self._state.journals

    def stop(self) -> None:
        """The loop has ended. Idempotent."""
        self._is_stopped = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)

    def one_pass(self) -> None:
        """Observe, decide, act, once."""
        observed = self._board.observe(self._launcher)
        now = Moment(monotonic_s=self._clock.monotonic(), wall_s=self._clock.now())
        before = self._state
        state, repairs = recovery.step(self._changed(before), observed, now, self._rules)
        state, asked = changes.step(state, observed, now, self._rules)
        after = status.conditions(state, observed, self._conditions, now.wall_s)
        actions = (
            *placement.decide(state.spec, state.newest, observed),
            *repairs,
            *asked,
            *journals.decide(state.journals, observed),
            *changes.decide(state.changes, observed),
            *status.decide(self._conditions, after),
        )
        self._observed, self._state, self._conditions = observed, state, after
        self._tell(before, state)
        for action in actions:
            self._act(action)
        if state.has_served:
            self._serving.set()

    def _changed(self, state: RepairState) -> RepairState:
        """The state after what other threads have said."""
        while True:
            try:
                change = self._changes.get_nowait()
            except Empty:
                return state
            state = change(state)

    def _tell(self, before: RepairState, after: RepairState) -> None:
        old = {journal.number: journal for journal in before.journals[-1:]}
        for journal in journals.news(before.journals, after.journals):
            for line in journals.told(old.get(journal.number), journal):
                logger.info("%s", line)
            self._on_journal(journal)
        earlier = {change.revision: change for change in before.changes[-1:]}
        for change in after.changes[max(len(before.changes) - 1, 0) :]:
            if text := changes.told(earlier.get(change.revision), change):
                logger.info("%s", text)

    def _act(self, action: Action) -> None:
        match action:
            case PutSpec():
                self._board.put_spec(action.previous, self._state.spec)
            case PutPlan():
                self._put_plan(action)
            case PutJournal():
                self._board.put_journal(action.number, action.value)
            case DropJournal():
                self._board.drop_journal(action.number)
            case PutChange():
                self._board.put_change(action.revision, action.value)
            case DropChange():
                self._board.drop_change(action.revision)
            case PutStatus():
                self._board.put_status(action.value)
            case StartWorker():
                self._launcher.start(action.name)
            case KillWorker():
                self._launcher.kill(action.name)
            case TellFenced():
                self._on_fenced(action.plan)
            case TellFormed():
                self._on_formed(action.plan, action.addresses)
            case Say():
                logger.info("%s", action.text)
            case FailRun():
                self._fail(action)
            case _:
                assert_never(action)

    def _put_plan(self, action: PutPlan) -> None:
        if self._board.put_plan_if(action.previous, encode_json(action.plan)):
            logger.info("plan of epoch %s is put", action.plan.epoch)
            # It is in force once it is seen: the next look comes at once.
            self._wake.set()

    def _fail(self, action: FailRun) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        logger.error("%s", action.reason)
        self._on_failure(action.reason, action.worker)
        self._serving.set()

    def _run(self) -> None:
        while not self._is_stopped:
            try:
                self.one_pass()
            except DejavuError as error:
                logger.warning("a pass of the operator failed, the next one tries again: %s", error)
            except Exception as error:  # An operator that dies unseen would leave the cluster unwatched.
                logger.exception("the operator cannot go on")
                self._act(FailRun(reason=f"the operator cannot go on: {error!r}"))
                return
            self._wake.wait(self._pause_s())
            self._wake.clear()

    def _pause_s(self) -> float:
        if self._state.is_hurried:
            return _HURRIED_PAUSE_S
        return _SERVING_PAUSE_S if self._serving.is_set() else _STARTING_PAUSE_S
