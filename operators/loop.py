"""The loop that keeps a cluster equal to its declaration: observe, decide, act, record. Level-triggered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol, assert_never

from dejavu.clock import Clock
from dejavu.control.plan import Plan
from dejavu.errors import DejavuError
from dejavu.ids import WorkerName
from operators import launch, membership, placement, status
from operators.actions import Action, FailRun, PutPlan, PutSpec, PutStatus, StartWorker
from operators.observation import Observed
from operators.processes import Launcher

logger = logging.getLogger(__name__)

_STARTING_PAUSE_S = 0.1
_SERVING_PAUSE_S = 0.5


class Board(Protocol):
    """The cluster's keys in the store, as the loop reads and writes them. Nothing here raises for an outage."""

    def observe(self, launcher: Launcher) -> Observed:
        """One look; members are None while the store cannot be read."""

    def put_spec(self, value: bytes) -> None: ...

    def put_plan(self, value: bytes) -> None: ...

    def put_status(self, value: bytes) -> None: ...


class ClusterOperator:
    """Runs ``one_pass`` until stopped, on a thread of its own; a pass can be called alone.

    Args:
        spec, plan_value: what the store is to hold.
        patience_s: how long a worker's lease may be gone before the run fails.
        on_failure: told once why the run cannot go on, on the operator's thread.
        wake: set by whoever knows that something has happened, such as the launcher.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        spec: bytes,
        plan_value: bytes,
        board: Board,
        launcher: Launcher,
        clock: Clock,
        patience_s: float,
        on_failure: Callable[[str, WorkerName | None], None],
        wake: threading.Event | None = None,
    ) -> None:
        self._plan = plan
        self._spec = spec
        self._plan_value = plan_value
        self._board = board
        self._launcher = launcher
        self._clock = clock
        self._patience_s = patience_s
        self._on_failure = on_failure
        self._attendance = membership.Attendance()
        self._conditions: status.Conditions = {}
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

    def wait_serving(self, timeout_s: float) -> bool:
        """True once every worker serves or the run has failed; False at the timeout."""
        return self._serving.wait(timeout_s)

    @property
    def observed(self) -> Observed | None:
        """The last look."""
        return self._observed

    def stop(self) -> None:
        """The loop has ended. Idempotent."""
        self._is_stopped = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)

    def one_pass(self) -> None:
        """Observe, decide, act, once."""
        observed = self._board.observe(self._launcher)
        now_s = self._clock.monotonic()
        self._attendance = membership.attend(self._attendance, observed, now_s)
        after = status.conditions(self._plan.workers, observed, self._conditions, self._clock.now())
        actions = (
            *placement.decide(self._spec, self._plan_value, observed),
            *launch.decide(self._plan.workers, observed),
            *membership.decide(
                self._plan.workers, self._attendance, observed, now_s=now_s, patience_s=self._patience_s
            ),
            *status.decide(self._conditions, after),
        )
        for action in actions:
            self._act(action)
        self._observed, self._conditions = observed, after
        if membership.all_serving(self._plan.workers, observed):
            self._serving.set()

    def _act(self, action: Action) -> None:
        match action:
            case PutSpec():
                self._board.put_spec(self._spec)
            case PutPlan():
                self._board.put_plan(self._plan_value)
            case PutStatus():
                self._board.put_status(action.value)
            case StartWorker():
                self._launcher.start(action.name)
            case FailRun():
                if not self._has_failed:
                    self._has_failed = True
                    logger.error("%s", action.reason)
                    self._on_failure(action.reason, action.worker)
                    self._serving.set()
            case _:
                assert_never(action)

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
            self._wake.wait(_SERVING_PAUSE_S if self._serving.is_set() else _STARTING_PAUSE_S)
            self._wake.clear()
