"""What each operator decides from one look at the cluster."""

from __future__ import annotations

import logging

import msgspec
import pytest

from dejavu.control.member import Member, MemberState, encode_json
from dejavu.ids import IncarnationId, WorkerName
from dejavu.store.entry import Entry, Snapshot
from dejavu.store.keys import Keys
from operators import launch, membership, placement, status
from operators.actions import FailRun, PutPlan, PutSpec, PutStatus, StartWorker
from operators.observation import Observed, ProcessExit, members_of

W0, W1 = WorkerName("w0"), WorkerName("w1")
DESIRED = (W0, W1)


def member(name: WorkerName, state: MemberState = "serving", problem: str | None = None) -> Member:
    return Member(
        name=name,
        incarnation=IncarnationId("i"),
        host="h",
        pid=1,
        address="127.0.0.1:1",
        device="cpu",
        memory_bytes=1,
        state=state,
        problem=problem,
    )


def observed(
    *members: Member,
    running: tuple[WorkerName, ...] = (),
    exits: tuple[ProcessExit, ...] = (),
    plan: bytes | None = b"plan",
    spec: bytes | None = b"spec",
) -> Observed:
    return Observed(
        members={member.name: member for member in members},
        plan=plan,
        spec=spec,
        running=frozenset(running),
        exits=exits,
    )


def unreadable(running: tuple[WorkerName, ...] = ()) -> Observed:
    return Observed(members=None, plan=None, spec=None, running=frozenset(running))


def test_launch_starts_every_worker_that_neither_runs_nor_is_registered() -> None:
    assert launch.decide(DESIRED, observed()) == (StartWorker(name=W0), StartWorker(name=W1))
    assert launch.decide(DESIRED, observed(running=(W0,))) == (StartWorker(name=W1),)


def test_launch_leaves_a_worker_alone_that_was_started_by_hand() -> None:
    assert launch.decide(DESIRED, observed(member(W0), member(W1))) == ()


def test_launch_starts_nobody_while_the_store_cannot_be_read() -> None:
    """A worker that runs elsewhere would have been started a second time."""
    assert launch.decide(DESIRED, unreadable()) == ()


@pytest.mark.parametrize(("code", "words"), [(3, "exit status 3"), (-9, "killed by signal 9")])
def test_launch_fails_the_run_on_a_worker_that_ended_and_says_how(code: int, words: str) -> None:
    gone = ProcessExit(name=W1, status=code)
    (action,) = launch.decide(DESIRED, observed(exits=(gone,)))
    assert action == FailRun(reason=f"worker w1 died ({words})", worker=W1)


def test_membership_waits_for_a_worker_that_has_never_been_seen() -> None:
    attendance = membership.attend(membership.Attendance(), observed(), 0.0)
    assert membership.decide(DESIRED, attendance, observed(), now_s=1e6, patience_s=5.0) == ()


def test_membership_fails_the_run_once_a_lease_is_gone_for_longer_than_the_patience() -> None:
    attendance = membership.attend(membership.Attendance(), observed(member(W0), member(W1)), 0.0)
    for now_s in (10.0, 12.0, 15.0):
        attendance = membership.attend(attendance, observed(member(W0)), now_s)
    assert membership.decide(DESIRED, attendance, observed(member(W0)), now_s=15.0, patience_s=5.0) == ()
    (action,) = membership.decide(DESIRED, attendance, observed(member(W0)), now_s=15.5, patience_s=5.0)
    assert isinstance(action, FailRun)
    assert action.worker == W1
    assert "w1 has not renewed its lease for 5.5 s" in action.reason


def test_membership_forgives_a_worker_that_registers_again() -> None:
    attendance = membership.attend(membership.Attendance(), observed(member(W0)), 0.0)
    attendance = membership.attend(attendance, observed(), 1.0)
    attendance = membership.attend(attendance, observed(member(W0)), 4.0)
    attendance = membership.attend(attendance, observed(), 9.0)
    assert attendance.missing_since_s == {W0: 9.0}


def test_an_outage_of_the_store_is_nobodys_absence() -> None:
    attendance = membership.attend(membership.Attendance(), observed(member(W0)), 0.0)
    attendance = membership.attend(attendance, observed(), 1.0)
    attendance = membership.attend(attendance, unreadable(), 100.0)
    assert membership.decide(DESIRED, attendance, unreadable(), now_s=100.0, patience_s=5.0) == ()
    attendance = membership.attend(attendance, observed(), 101.0)
    assert attendance.missing_since_s == {W0: 101.0}


def test_a_stranger_that_leaves_fails_nothing() -> None:
    stranger = member(WorkerName("other"), problem="lost")
    attendance = membership.attend(membership.Attendance(), observed(stranger), 0.0)
    attendance = membership.attend(attendance, observed(), 1.0)
    assert membership.decide(DESIRED, attendance, observed(stranger), now_s=100.0, patience_s=5.0) == ()


def test_membership_fails_the_run_on_a_worker_that_says_it_cannot_go_on() -> None:
    seen = observed(member(W0, "draining", problem="no memory"))
    (action,) = membership.decide(DESIRED, membership.Attendance(), seen, now_s=0.0, patience_s=5.0)
    assert action == FailRun(reason="worker w0 cannot go on: no memory", worker=W0)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (observed(member(W0), member(W1)), True),
        (observed(member(W0)), False),
        (observed(member(W0), member(W1, "ready")), False),
        (unreadable(), False),
    ],
)
def test_all_serve_only_when_each_desired_worker_says_so(seen: Observed, expected: bool) -> None:
    assert membership.all_serving(DESIRED, seen) is expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (observed(), ()),
        (observed(spec=None, plan=None), (PutSpec(), PutPlan())),
        (observed(plan=b"another"), (PutPlan(),)),
        (unreadable(), ()),
    ],
)
def test_placement_puts_what_is_missing_or_another(seen: Observed, expected: tuple[object, ...]) -> None:
    assert placement.decide(b"spec", b"plan", seen) == expected


def test_conditions_go_from_starting_to_ready_to_degraded_and_keep_their_times() -> None:
    starting = status.conditions(DESIRED, observed(member(W0)), {}, 1.0)
    assert (starting["Ready"].status, starting["Ready"].reason) == (False, "no worker w1")
    assert (starting["Degraded"].status, starting["Degraded"].reason) == (False, "starting")
    ready = status.conditions(DESIRED, observed(member(W0), member(W1)), starting, 2.0)
    assert (ready["Ready"].status, ready["Ready"].since_s) == (True, 2.0)
    assert not ready["Degraded"].status
    degraded = status.conditions(DESIRED, observed(member(W0), member(W1, "draining")), ready, 3.0)
    assert (degraded["Degraded"].status, degraded["Degraded"].reason) == (True, "w1 is draining")
    later = status.conditions(DESIRED, observed(member(W0), member(W1, "draining")), degraded, 4.0)
    assert later == degraded
    assert later["Repairing"].since_s == 1.0


def test_an_unreadable_store_leaves_the_conditions_as_they_were() -> None:
    before = status.conditions(DESIRED, observed(member(W0)), {}, 1.0)
    assert status.conditions(DESIRED, unreadable(), before, 2.0) is before


def test_the_status_is_put_only_when_a_condition_has_changed() -> None:
    before = status.conditions(DESIRED, observed(), {}, 1.0)
    assert status.decide(before, dict(before)) == ()
    (action,) = status.decide({}, before)
    assert isinstance(action, PutStatus)
    assert msgspec.json.decode(action.value)["Ready"]["status"] is False


def test_members_are_read_from_their_keys_and_others_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    keys = Keys("c")
    entries = {keys.worker(W0): encode_json(member(W0)), keys.worker(W1): b"{}", keys.plan: b"plan"}
    snapshot = Snapshot(
        entries=tuple(Entry(key=key, value=value, mod_revision=1, create_revision=1) for key, value in entries.items()),
        revision=1,
    )
    with caplog.at_level(logging.WARNING):
        assert members_of(snapshot, keys) == {W0: member(W0)}
    assert keys.worker(W1) in caplog.text
