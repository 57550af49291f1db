"""The operator's loop, over a store and a launcher that are made up."""

from __future__ import annotations

import threading

import msgspec

from dejavu.clock import VirtualClock
from dejavu.control.journal import RestoreReceipt
from dejavu.control.member import Member, encode_json
from dejavu.control.plan import Fenced, Plan
from dejavu.errors import Retryable
from dejavu.ids import Epoch, IncarnationId, WorkerName
from operators.launcher import Launcher
from operators.loop import ClusterOperator
from operators.observation import Observed

from harness.made_up_launcher import FakeLauncher, member
from harness.plans import colocated_plan

W0, W1 = WorkerName("w0"), WorkerName("w1")
PLAN = colocated_plan(2)


class FakeBoard:
    """Keeps what is put; members are set by the test."""

    def __init__(self) -> None:
        self.members: dict[WorkerName, Member] | None = {}
        self.spec: bytes | None = None
        self.plan: bytes | None = None
        self.journals: dict[int, bytes] = {}
        self.statuses: list[bytes] = []
        self.error: Exception | None = None

    def observe(self, launcher: Launcher) -> Observed:
        if self.error is not None:
            raise self.error
        members = None if self.members is None else dict(self.members)
        return Observed(
            members=members,
            plan=self.plan,
            spec=self.spec,
            running=launcher.running(),
            exits=launcher.exits(),
            pids=launcher.pids(),
            is_ending=launcher.is_stopping(),
            journals=dict(self.journals),
        )

    def put_spec(self, previous: bytes | None, value: bytes) -> None:
        if self.spec == previous:
            self.spec = value

    def put_plan_if(self, previous: bytes | None, value: bytes) -> bool | None:
        if self.plan != previous:
            return False
        self.plan = value
        return True

    def put_journal(self, number: int, value: bytes) -> None:
        self.journals[number] = value

    def drop_journal(self, number: int) -> None:
        del self.journals[number]

    def put_status(self, value: bytes) -> None:
        self.statuses.append(value)


class Stand:
    """An operator with everything around it."""

    def __init__(self, plan: Plan = PLAN) -> None:
        self.board, self.launcher, self.clock = FakeBoard(), FakeLauncher(), VirtualClock()
        self.failures: list[tuple[str, WorkerName | None]] = []
        self.failed = threading.Event()
        self.fenced: list[Plan] = []
        self.formed: list[tuple[Plan, dict[WorkerName, str]]] = []
        self.phases: list[str] = []
        self.operator = ClusterOperator(
            plan=plan,
            spec=b"spec",
            board=self.board,
            launcher=self.launcher,
            clock=self.clock,
            may_grow=True,
            confirm_s=6.5,
            patience_s=5.0,
            start_timeout_s=30.0,
            on_fenced=self.fenced.append,
            on_formed=lambda plan, addresses: self.formed.append((plan, dict(addresses))),
            on_failure=self._fail,
            on_journal=lambda journal: self.phases.append(journal.phase),
        )

    def serve(self) -> None:
        """Every worker of the plan in force serves in it, and the operator has seen that."""
        plan = self.operator.plan
        self.board.members = {name: member(name, epoch=plan.epoch, incarnation="new") for name in plan.workers}
        self.operator.one_pass()

    def _fail(self, reason: str, worker: WorkerName | None) -> None:
        self.failures.append((reason, worker))
        self.failed.set()


def serving_stand() -> Stand:
    stand = Stand()
    stand.operator.one_pass()
    stand.board.members = {W0: member(W0), W1: member(W1)}
    stand.operator.one_pass()
    return stand


def test_one_pass_puts_spec_and_plan_and_starts_every_worker_once() -> None:
    stand = Stand()
    stand.operator.one_pass()
    stand.operator.one_pass()
    assert (stand.board.spec, stand.board.plan) == (b"spec", encode_json(PLAN))
    assert stand.launcher.started == [W0, W1]
    assert len(stand.board.statuses) == 1


def test_a_store_that_was_wiped_gets_everything_back() -> None:
    stand = serving_stand()
    stand.launcher.end(W1)
    stand.operator.one_pass()
    put = (stand.board.spec, stand.board.plan, dict(stand.board.journals))
    stand.board.spec = stand.board.plan = None
    stand.board.journals.clear()
    stand.operator.one_pass()
    assert (stand.board.spec, stand.board.plan, stand.board.journals) == put
    assert stand.operator.plan.epoch == 1


def test_serving_is_announced_once_every_worker_serves_with_its_address() -> None:
    stand = Stand()
    stand.board.members = {W0: member(W0), W1: member(W1, "ready")}
    stand.operator.one_pass()
    assert not stand.operator.wait_serving(0.0)
    stand.board.members = {W0: member(W0), W1: member(W1)}
    stand.operator.one_pass()
    stand.operator.one_pass()
    assert stand.operator.wait_serving(0.0)
    assert stand.formed == [(PLAN, {W0: "127.0.0.1:1", W1: "127.0.0.1:1"})]
    assert stand.failures == []


def test_a_worker_that_dies_before_it_serves_fails_the_run_once_and_ends_the_wait() -> None:
    stand = Stand()
    stand.operator.one_pass()
    stand.launcher.end(W1)
    stand.operator.one_pass()
    stand.operator.one_pass()
    assert stand.failures == [("worker w1 died (killed by signal 9)", W1)]
    assert stand.operator.wait_serving(0.0)


def test_a_worker_that_dies_later_is_replaced_and_its_repair_told_from_fence_to_resume() -> None:
    stand = serving_stand()
    stand.launcher.end(W1)
    stand.operator.one_pass()
    assert (stand.operator.plan.epoch, stand.fenced) == (1, [])
    stand.operator.one_pass()
    assert stand.board.plan == encode_json(stand.operator.plan)
    assert stand.fenced == [stand.operator.plan]
    assert stand.launcher.started == [W0, W1, W1]
    stand.serve()
    assert [plan.epoch for plan, _ in stand.formed] == [1, 2]
    stand.operator.resumed(Epoch(2), RestoreReceipt(restored_s=1.0, resumed_s=2.0))
    stand.operator.one_pass()
    (journal,) = stand.operator.journals
    assert journal.receipt is not None
    assert stand.board.journals == {1: encode_json(journal)}
    assert list(dict.fromkeys(stand.phases)) == ["fence", "replace", "restore", "done"]
    assert stand.failures == []


def test_the_status_says_repairing_with_the_reason_until_the_rows_have_resumed() -> None:
    """Readiness used to stay true after a worker had died (field report B34)."""
    stand = serving_stand()
    stand.launcher.end(W1)
    stand.operator.one_pass()
    shown = msgspec.json.decode(stand.board.statuses[-1])
    assert (shown["Ready"]["status"], shown["Repairing"]["status"]) == (False, True)
    assert shown["Ready"]["reason"] == "w1 died (killed by signal 9): fence"
    stand.operator.one_pass()
    assert msgspec.json.decode(stand.board.statuses[-1])["Ready"]["reason"] == "w1 died (killed by signal 9): replace"
    stand.serve()
    stand.operator.resumed(Epoch(2), RestoreReceipt(restored_s=1.0, resumed_s=2.0))
    stand.operator.one_pass()
    shown = msgspec.json.decode(stand.board.statuses[-1])
    assert (shown["Ready"]["status"], shown["Repairing"]["status"]) == (True, False)


def test_a_broken_link_that_nothing_explains_is_made_anew() -> None:
    stand = serving_stand()
    stand.operator.suspect(W1, Epoch(1), "reset by peer", "w0")
    stand.operator.one_pass()
    stand.clock.advance(6.5)
    stand.operator.one_pass()
    stand.operator.one_pass()
    (journal,) = stand.operator.journals
    assert (journal.how, journal.failures[0].reason) == ({W1: "links"}, "lost its link: reset by peer (says w0)")
    assert (stand.operator.plan.epoch, stand.launcher.killed) == (2, [])


def test_a_lease_that_runs_out_costs_the_worker_its_place_and_its_process_its_life() -> None:
    stand = serving_stand()
    stand.board.members = {W0: member(W0)}
    for _ in range(3):
        stand.operator.one_pass()
        stand.clock.advance(0.3)
    assert stand.operator.plan.fenced == (Fenced(worker=W1, incarnation=IncarnationId("i")),)
    assert stand.launcher.killed == [W1]
    assert stand.failures == []


def test_a_plan_that_the_store_does_not_take_holds_everything_up() -> None:
    stand = serving_stand()
    stand.board.put_plan_if = lambda previous, value: None  # type: ignore[method-assign]
    stand.launcher.end(W1)
    for _ in range(3):
        stand.operator.one_pass()
    assert (stand.operator.plan.epoch, stand.fenced, stand.launcher.started) == (1, [], [W0, W1])


def test_an_outage_of_the_store_changes_nothing() -> None:
    stand = serving_stand()
    stand.board.members = None
    stand.clock.advance(1000.0)
    stand.operator.one_pass()
    assert stand.failures == []
    assert stand.launcher.started == [W0, W1]
    assert stand.operator.journals == ()


def test_a_launcher_that_ends_the_run_makes_no_end_a_failure() -> None:
    stand = serving_stand()
    stand.launcher.is_ending = True
    stand.board.members = {}
    stand.operator.one_pass()
    stand.clock.advance(100.0)
    stand.operator.one_pass()
    assert stand.operator.journals == ()
    assert stand.failures == []


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
