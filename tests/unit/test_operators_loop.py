"""The operator's loop and its board, over a store and a launcher that are made up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dejavu.clock import VirtualClock
from dejavu.control.member import Member, MemberState, encode_json
from dejavu.engine.cluster_view import ControllerEntry
from dejavu.errors import ConfigError, Fatal, Retryable
from dejavu.ids import IncarnationId, WorkerName
from dejavu.store.entry import Entry, Snapshot
from dejavu.store.faults import StoreUnavailable
from dejavu.store.keys import Keys
from operators.board import StoreBoard
from operators.loop import Board, ClusterOperator
from operators.observation import Observed, ProcessExit

from harness.plans import colocated_plan

W0, W1 = WorkerName("w0"), WorkerName("w1")
ENTRY = ControllerEntry(incarnation="me", host="h", pid=1, address="127.0.0.1:1")


def member(name: WorkerName, state: MemberState = "serving") -> Member:
    return Member(
        name=name,
        incarnation=IncarnationId("i"),
        host="h",
        pid=1,
        address="127.0.0.1:1",
        device="cpu",
        memory_bytes=1,
        state=state,
    )


class FakeLauncher:
    def __init__(self) -> None:
        self.started: list[WorkerName] = []
        self.ended: list[ProcessExit] = []

    def start(self, name: WorkerName) -> None:
        self.started.append(name)

    def running(self) -> frozenset[WorkerName]:
        return frozenset(self.started) - {gone.name for gone in self.ended}

    def exits(self) -> tuple[ProcessExit, ...]:
        return tuple(self.ended)

    def log_of(self, name: WorkerName) -> Path:
        return Path(name)

    def stop(self) -> None:
        pass


class FakeBoard:
    """Keeps what is put; members are set by the test."""

    def __init__(self) -> None:
        self.members: dict[WorkerName, Member] | None = {}
        self.spec: bytes | None = None
        self.plan: bytes | None = None
        self.statuses: list[bytes] = []
        self.error: Exception | None = None

    def observe(self, launcher: FakeLauncher) -> Observed:
        if self.error is not None:
            raise self.error
        members = None if self.members is None else dict(self.members)
        return Observed(
            members=members, plan=self.plan, spec=self.spec, running=launcher.running(), exits=launcher.exits()
        )

    def put_spec(self, value: bytes) -> None:
        self.spec = value

    def put_plan(self, value: bytes) -> None:
        self.plan = value

    def put_status(self, value: bytes) -> None:
        self.statuses.append(value)


class Stand:
    """An operator with everything around it."""

    def __init__(self) -> None:
        self.board, self.launcher, self.clock = FakeBoard(), FakeLauncher(), VirtualClock()
        self.failures: list[tuple[str, WorkerName | None]] = []
        self.failed = threading.Event()
        self.operator = ClusterOperator(
            plan=colocated_plan(2),
            spec=b"spec",
            plan_value=b"plan",
            board=self.board,
            launcher=self.launcher,
            clock=self.clock,
            patience_s=5.0,
            on_failure=self._fail,
        )

    def _fail(self, reason: str, worker: WorkerName | None) -> None:
        self.failures.append((reason, worker))
        self.failed.set()


def test_one_pass_puts_spec_and_plan_and_starts_every_worker_once() -> None:
    stand = Stand()
    stand.operator.one_pass()
    stand.operator.one_pass()
    assert (stand.board.spec, stand.board.plan) == (b"spec", b"plan")
    assert stand.launcher.started == [W0, W1]
    assert len(stand.board.statuses) == 1


def test_a_store_that_was_wiped_gets_everything_back() -> None:
    stand = Stand()
    stand.operator.one_pass()
    stand.board.spec = stand.board.plan = None
    stand.operator.one_pass()
    assert (stand.board.spec, stand.board.plan) == (b"spec", b"plan")


def test_serving_is_announced_once_every_worker_serves() -> None:
    stand = Stand()
    stand.board.members = {W0: member(W0), W1: member(W1, "ready")}
    stand.operator.one_pass()
    assert not stand.operator.wait_serving(0.0)
    stand.board.members = {W0: member(W0), W1: member(W1)}
    stand.operator.one_pass()
    assert stand.operator.wait_serving(0.0)
    assert stand.failures == []


def test_a_worker_that_died_fails_the_run_once_and_ends_the_wait() -> None:
    stand = Stand()
    stand.operator.one_pass()
    stand.launcher.ended.append(ProcessExit(name=W1, status=-9))
    stand.operator.one_pass()
    stand.operator.one_pass()
    assert stand.failures == [("worker w1 died (killed by signal 9)", W1)]
    assert stand.operator.wait_serving(0.0)


def test_a_lease_that_stays_away_fails_the_run_after_the_patience() -> None:
    stand = Stand()
    stand.board.members = {W0: member(W0), W1: member(W1)}
    stand.operator.one_pass()
    stand.board.members = {W0: member(W0)}
    stand.operator.one_pass()
    stand.clock.advance(5.0)
    stand.operator.one_pass()
    assert stand.failures == []
    stand.clock.advance(0.5)
    stand.operator.one_pass()
    assert [worker for _, worker in stand.failures] == [W1]


def test_an_outage_of_the_store_changes_nothing() -> None:
    stand = Stand()
    stand.board.members = {W0: member(W0), W1: member(W1)}
    stand.operator.one_pass()
    stand.board.members = None
    stand.clock.advance(1000.0)
    stand.operator.one_pass()
    assert stand.failures == []
    assert stand.launcher.started == []


def test_the_loop_goes_on_after_a_pass_that_may_be_tried_again() -> None:
    stand = Stand()
    stand.board.error = Retryable("not now")
    stand.operator.start()
    stand.board.error = None
    stand.board.members = {W0: member(W0), W1: member(W1)}
    stand.operator.wake()
    assert stand.operator.wait_serving(10.0)
    stand.operator.stop()
    assert stand.failures == []


def test_a_pass_that_breaks_fails_the_run_instead_of_dying_unseen() -> None:
    stand = Stand()
    stand.board.error = RuntimeError("out of processes")
    stand.operator.start()
    assert stand.failed.wait(10.0)
    stand.operator.stop()
    assert "out of processes" in stand.failures[0][0]


class FakeStore:
    """A client and a lease keeper in one: a map."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_away = False
        self.has_lease = True
        self.on_refusal: Callable[[], None] = lambda: None
        self.lease_id = 7

    def wait_held(self, timeout_s: float) -> bool:
        return self.has_lease

    def put_if(self, key: str, value: bytes, mod_revision: int, *, lease_id: int) -> bool:
        if key in self.values:
            self.on_refusal()
            return False
        self.values[key] = value
        return True

    def update(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> Entry | None:
        return _entry(key, self.values[key]) if key in self.values else None

    def get_prefix(self, prefix: str) -> Snapshot:
        if self.is_away:
            raise StoreUnavailable("away")
        return Snapshot(entries=tuple(_entry(key, value) for key, value in sorted(self.values.items())), revision=1)


def _entry(key: str, value: bytes) -> Entry:
    return Entry(key=key, value=value, mod_revision=1, create_revision=1)


def board(store: FakeStore) -> StoreBoard:
    return StoreBoard(store, store, Keys("c"))  # type: ignore[arg-type]


def test_the_board_fits_the_loop() -> None:
    fits: Board = board(FakeStore())
    assert fits


def test_a_claim_waits_for_the_lease_of_a_dead_controller_to_run_out() -> None:
    store = FakeStore()
    store.values[Keys("c").controller] = b"another"
    clock = VirtualClock()
    store.on_refusal = lambda: store.values.clear() if clock.now() > 3.0 else None
    board(store).claim(ENTRY, clock, lease_ttl_s=5.0)
    assert store.values[Keys("c").controller] == encode_json(ENTRY)


def test_a_claim_beside_a_living_controller_is_refused_naming_it() -> None:
    store = FakeStore()
    store.values[Keys("c").controller] = b'{"host":"elsewhere"}'
    with pytest.raises(ConfigError, match=r"(?s)cluster.name=c.*elsewhere"):
        board(store).claim(ENTRY, VirtualClock(), lease_ttl_s=5.0)


def test_a_claim_without_a_lease_is_fatal() -> None:
    store = FakeStore()
    store.has_lease = False
    with pytest.raises(Fatal, match="no lease"):
        board(store).claim(ENTRY, VirtualClock(), lease_ttl_s=5.0)


def test_the_board_sees_what_was_put() -> None:
    store = FakeStore()
    made = board(store)
    made.put_spec(b"spec")
    made.put_plan(b'{"epoch": 1}')
    store.values[Keys("c").worker(W0)] = encode_json(member(W0))
    seen = made.observe(FakeLauncher())
    assert (seen.spec, seen.plan) == (b"spec", b'{"epoch": 1}')
    assert seen.members == {W0: member(W0)}


def test_the_board_knows_nothing_of_members_while_the_store_is_away_and_of_processes_it_does() -> None:
    store, launcher = FakeStore(), FakeLauncher()
    made = board(store)
    launcher.start(W0)
    store.is_away = True
    seen = made.observe(launcher)
    assert (seen.members, seen.running) == (None, frozenset({W0}))
    store.is_away = False
    assert made.observe(launcher).members == {}
