"""Workers that are killed or frozen are replaced, over a real etcd and real processes that compute nothing."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from dejavu.clock import SystemClock
from dejavu.control.journal import RepairJournal, RestoreReceipt
from dejavu.control.member import encode_json
from dejavu.control.plan import Plan
from dejavu.engine.cluster_view import ControllerEntry
from dejavu.engine.worker_spec import WorkerSpec
from dejavu.ids import WorkerName
from dejavu.store.client import StoreClient
from dejavu.store.keys import Keys
from dejavu.store.lease import LeaseKeeper
from operators.board import StoreBoard
from operators.loop import ClusterOperator
from operators.processes import ProcessLauncher

from harness.plans import colocated_plan
from harness.store_server import StoreServer, until

pytestmark = [pytest.mark.slow, pytest.mark.faults]

W0, W1, W2, W3 = (WorkerName(f"w{index}") for index in range(4))
TTL_S = 2
KEYS = Keys("repairs")
FOLLOWER = (sys.executable, str(Path(__file__).parents[1] / "harness" / "plan_follower.py"))
ENTRY = ControllerEntry(incarnation="me", host="here", pid=1, address="127.0.0.1:1")


@dataclass(slots=True)
class Crew:
    """An operator with its processes; a controller that resumes at once stands behind it."""

    store: StoreServer
    launcher: ProcessLauncher
    client: StoreClient
    failures: list[str] = field(default_factory=list)
    formed: list[int] = field(default_factory=list)
    operator: ClusterOperator | None = None

    def resume(self, plan: Plan) -> None:
        """Rows go on as soon as the workers serve."""
        self.formed.append(plan.epoch)
        if plan.epoch > 1 and self.operator is not None:
            now_s = SystemClock().now()
            self.operator.resumed(plan.epoch, RestoreReceipt(restored_s=now_s, resumed_s=now_s))

    def wait_journals(self, condition: Callable[[tuple[RepairJournal, ...]], bool]) -> tuple[RepairJournal, ...]:
        """The repairs so far, once they are as wanted."""
        assert self.operator is not None
        operator = self.operator
        until(lambda: condition(operator.journals), f"{operator.journals} {self.failures}")
        return operator.journals

    def conditions(self) -> dict[str, dict[str, object]]:
        """What the store tells people."""
        value = self.value_of(KEYS.status)
        return {} if value is None else msgspec.json.decode(value)

    def value_of(self, key: str) -> bytes | None:
        """What the store has."""
        entry = self.client.get(key)
        return None if entry is None else entry.value


@pytest.fixture
def store(tmp_path: Path, nothing_left: None) -> Iterator[StoreServer]:
    server = StoreServer(tmp_path)
    server.start()
    yield server
    server.kill()


@contextlib.contextmanager
def crew(store: StoreServer, folder: Path, plan: Plan) -> Iterator[Crew]:
    """Every worker of the plan serves."""
    wake = threading.Event()

    def spec_of(name: WorkerName) -> bytes:
        return encode_json(
            WorkerSpec(
                name=name,
                cluster=KEYS.cluster,
                secret="s",
                store=store.spec,
                host="127.0.0.1",
                lease_ttl_s=TTL_S,
                device="cpu",
                transport_kind="tcp",
                transport_settings={},
                start_timeout_s=60.0,
            )
        )

    with contextlib.ExitStack() as stack:
        client = stack.enter_context(contextlib.closing(StoreClient(store.spec)))
        keeper = stack.enter_context(contextlib.closing(LeaseKeeper(store.spec, TTL_S, {})))
        launcher = ProcessLauncher(spec_of, folder, num_threads=1, on_exit=wake.set, command=FOLLOWER)
        made = Crew(store=store, launcher=launcher, client=client)
        board = StoreBoard(client, keeper, KEYS)
        board.claim(ENTRY, SystemClock(), lease_ttl_s=TTL_S)
        made.operator = ClusterOperator(
            plan=plan,
            spec=b"{}",
            board=board,
            launcher=launcher,
            clock=SystemClock(),
            may_grow=True,
            confirm_s=TTL_S + 1.5,
            patience_s=20.0,
            start_timeout_s=60.0,
            on_fenced=lambda plan: None,
            on_formed=lambda plan, addresses: made.resume(plan),
            on_failure=lambda reason, worker: made.failures.append(reason),
            wake=wake,
        )
        stack.callback(made.operator.stop)
        stack.callback(launcher.stop)
        made.operator.start()
        assert made.operator.wait_serving(30.0)
        assert made.failures == []
        yield made


def is_done(*numbers: int) -> Callable[[tuple[RepairJournal, ...]], bool]:
    """Repairs of these numbers exist, and all are done."""
    return lambda journals: [journal.number for journal in journals if journal.phase == "done"] == list(numbers)


def test_a_killed_worker_is_replaced_by_a_standby_and_the_next_one_by_its_successor(
    store: StoreServer, tmp_path: Path
) -> None:
    plan = msgspec.structs.replace(colocated_plan(3), standby=(W3,))
    with crew(store, tmp_path / "logs", plan) as made:
        assert made.operator is not None
        operator = made.operator
        made.launcher.signal(W1, signal.SIGKILL)
        (journal,) = made.wait_journals(is_done(1))
        assert journal.how == {W1: "standby"}
        assert operator.plan.workers == (W0, W3, W2)
        until(lambda: W1 in (operator.observed.members or {}) if operator.observed else False, "w1 waits as a standby")
        until(lambda: bool(made.conditions()["Ready"]["status"]), "ready again")
        made.launcher.signal(W0, signal.SIGKILL)
        journals = made.wait_journals(is_done(1, 2))
        assert operator.plan.epoch == 3
        assert made.formed == [1, 2, 3]
        until(lambda: made.value_of(KEYS.repairs(2)) == encode_json(journals[-1]), "the journal is in the store")


def test_a_frozen_worker_is_killed_behind_the_fence_and_replaced_by_a_new_process(
    store: StoreServer, tmp_path: Path
) -> None:
    with crew(store, tmp_path / "logs", colocated_plan(2)) as made:
        frozen = made.launcher.pid_of(W1)
        made.launcher.signal(W1, signal.SIGSTOP)
        (journal,) = made.wait_journals(is_done(1))
        assert (journal.failures[0].cause, journal.how) == ("lease", {W1: "process"})
        assert made.launcher.pid_of(W1) != frozen
        assert made.launcher.exits() == ()
        assert made.failures == []


@pytest.mark.grid
def test_a_worker_killed_while_etcd_is_away_is_replaced_when_it_is_back(store: StoreServer, tmp_path: Path) -> None:
    with crew(store, tmp_path / "logs", colocated_plan(3)) as made:
        assert made.operator is not None
        store.kill()
        made.launcher.signal(W1, signal.SIGKILL)
        made.wait_journals(lambda journals: len(journals) == 1)
        assert made.operator.plan.epoch == 1
        store.start()
        (journal,) = made.wait_journals(is_done(1))
        assert [failure.worker for failure in journal.failures] == [W1]


def test_a_wiped_store_gets_the_plan_of_the_epoch_in_force_back_and_nobody_is_replaced(
    store: StoreServer, tmp_path: Path
) -> None:
    with crew(store, tmp_path / "logs", colocated_plan(2)) as made:
        assert made.operator is not None
        made.launcher.signal(W1, signal.SIGKILL)
        made.wait_journals(is_done(1))
        pids = made.launcher.pids()
        store.wipe()
        store.start()
        plan, keys = encode_json(made.operator.plan), (KEYS.worker(W0), KEYS.worker(W1), KEYS.repairs(1))
        until(lambda: made.value_of(KEYS.plan) == plan, "the plan is back")
        until(lambda: all(made.value_of(key) is not None for key in keys), "everybody is back")
        assert made.operator.plan.epoch == 2
        assert len(made.operator.journals) == 1
        assert made.launcher.pids() == pids
