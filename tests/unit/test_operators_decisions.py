"""What each operator decides from one look at the cluster."""

from __future__ import annotations

import logging

import msgspec
import pytest

from dejavu.control.member import Member, encode_json
from dejavu.ids import Epoch, IncarnationId, WorkerName
from dejavu.store.entry import Entry, Snapshot
from dejavu.store.keys import Keys
from operators import launch, membership, placement
from operators.actions import PutPlan, PutSpec, StartWorker
from operators.membership import Attendance
from operators.observation import Observed, journals_of, members_of

from harness.made_up_launcher import member
from harness.plans import colocated_plan

W0, W1 = WorkerName("w0"), WorkerName("w1")
DESIRED = (W0, W1)
PLAN = colocated_plan(2)
LATER = msgspec.structs.replace(PLAN, epoch=Epoch(2))
NOBODY: frozenset[IncarnationId] = frozenset()


def observed(
    *members: Member,
    running: tuple[WorkerName, ...] = (),
    plan: bytes | None = None,
    spec: bytes | None = b"spec",
    own_key_present: bool = True,
    losses: int = 0,
) -> Observed:
    return Observed(
        members={member.name: member for member in members},
        plan=plan,
        spec=spec,
        running=frozenset(running),
        own_key_present=own_key_present,
        losses=losses,
    )


def unreadable(running: tuple[WorkerName, ...] = ()) -> Observed:
    return Observed(members=None, plan=None, spec=None, running=frozenset(running))


def attended(*looks: tuple[float, Observed], gone: frozenset[IncarnationId] = NOBODY) -> Attendance:
    """The attendance after these looks, with a patience of 5 s."""
    attendance = Attendance()
    for now_s, seen in looks:
        attendance = membership.attend(attendance, seen, now_s, names=DESIRED, gone=gone, patience_s=5.0)
    return attendance


def started(seen: Observed, now_s: float = 0.0, **starts_s: tuple[float, ...]) -> list[WorkerName]:
    """Who is started in this look, after earlier starts at these times."""
    starts = {WorkerName(name): times_s for name, times_s in starts_s.items()}
    actions = launch.decide(DESIRED, attended((now_s, seen)), seen, starts, now_s)
    return [action.name for action in actions if isinstance(action, StartWorker)]


def test_launch_starts_every_worker_that_neither_runs_nor_is_registered() -> None:
    assert started(observed()) == [W0, W1]
    assert started(observed(running=(W0,))) == [W1]


def test_launch_leaves_a_worker_alone_that_was_started_by_hand() -> None:
    assert started(observed(member(W0), member(W1))) == []


def test_launch_starts_nobody_while_the_store_cannot_be_read() -> None:
    """A worker that runs elsewhere would have been started a second time."""
    assert started(unreadable()) == []


def test_launch_leaves_a_worker_alone_that_is_missed_but_not_dead() -> None:
    looks = (0.0, observed(member(W0), member(W1))), (1.0, observed(member(W0)))
    assert launch.decide(DESIRED, attended(*looks), observed(member(W0)), {}, 1.0) == ()


@pytest.mark.parametrize(
    ("earlier", "pause_s"), [((100.0,), 1.0), ((99.0, 100.0), 2.0), ((97.0, 98.0, 100.0), 4.0), ((30.0, 100.0), 1.0)]
)
def test_launch_pauses_longer_before_each_start_of_the_last_minute(earlier: tuple[float, ...], pause_s: float) -> None:
    seen = observed(running=(W1,))
    assert started(seen, 100.0 + pause_s - 0.01, w0=earlier) == []
    assert started(seen, 100.0 + pause_s, w0=earlier) == [W0]


def test_a_name_may_be_started_four_times_a_minute() -> None:
    starts: launch.Starts = {}
    for now_s in (0.0, 1.0, 3.0, 7.0):
        assert launch.may_start(W0, starts, now_s)
        starts = launch.noted(starts, [W0], now_s)
    assert not launch.may_start(W0, starts, 59.0)
    assert launch.may_start(W1, starts, 59.0)
    assert launch.may_start(W0, starts, 60.5)


def test_a_missed_worker_is_dead_after_a_second_look() -> None:
    attendance = attended((0.0, observed(member(W0), member(W1))), (10.0, observed(member(W0))))
    assert attendance.missing_since_s == {W1: 10.0}
    assert attendance.limit_s(10.0, 5.0) == membership.CONFIRM_LOOKS_S


@pytest.mark.parametrize(
    "seen",
    [
        observed(member(W0), own_key_present=False),
        observed(member(W0), losses=1),
        observed(),
    ],
    ids=["the controller's key is gone, too", "the controller's lease was lost", "all vanish at once"],
)
def test_a_store_that_lost_more_than_a_worker_gets_the_long_patience(seen: Observed) -> None:
    attendance = attended((0.0, observed(member(W0), member(W1))), (10.0, seen))
    assert attendance.limit_s(14.9, 5.0) == 5.0
    assert attendance.limit_s(15.0, 5.0) == membership.CONFIRM_LOOKS_S


def test_membership_forgives_a_worker_that_registers_again() -> None:
    looks = ((0.0, observed(member(W0))), (1.0, observed()), (4.0, observed(member(W0))), (9.0, observed()))
    assert attended(*looks).missing_since_s == {W0: 9.0}


def test_an_outage_of_the_store_is_nobodys_absence() -> None:
    looks = ((0.0, observed(member(W0))), (1.0, observed()), (100.0, unreadable()))
    assert attended(*looks).missing_since_s == {}
    assert attended(*looks, (101.0, observed())).missing_since_s == {W0: 101.0}


def test_a_stranger_that_leaves_is_not_missed() -> None:
    assert attended((0.0, observed(member(WorkerName("other")))), (1.0, observed())) == Attendance()


def test_what_a_dead_incarnation_registers_is_not_looked_at() -> None:
    """A frozen worker that wakes puts its key again, over that of the one that replaced it."""
    assert attended((0.0, observed(member(W0))), gone=frozenset({IncarnationId("i")})).seen == {}


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([observed(member(W0), member(W1))], True),
        ([observed(member(W0))], False),
        ([observed(member(W0), member(W1, "ready"))], False),
        ([observed(member(W0), member(W1, epoch=2))], False),
        ([observed(member(W0), member(W1)), observed(member(W0))], False),
    ],
)
def test_all_serve_only_when_each_worker_says_so_of_this_epoch(looks: list[Observed], expected: bool) -> None:
    assert membership.all_serving(PLAN, attended(*((float(at), seen) for at, seen in enumerate(looks)))) is expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (observed(plan=encode_json(PLAN)), ()),
        (observed(spec=None), (PutSpec(previous=None), PutPlan(plan=PLAN, previous=None))),
        (observed(plan=b"another"), (PutPlan(plan=PLAN, previous=b"another"),)),
        (observed(plan=encode_json(LATER)), ()),
        (unreadable(), ()),
    ],
    ids=["in place", "missing", "another", "newer", "unreadable"],
)
def test_placement_puts_what_is_missing_or_another_but_nothing_over_a_newer_plan(
    seen: Observed, expected: tuple[object, ...]
) -> None:
    assert placement.decide(b"spec", PLAN, seen) == expected


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


def test_journals_are_read_from_their_keys_by_number() -> None:
    keys = Keys("c")
    entries = {keys.repairs(3): b"three", keys.repairs_prefix + "x": b"", keys.plan: b"plan"}
    snapshot = Snapshot(
        entries=tuple(Entry(key=key, value=value, mod_revision=1, create_revision=1) for key, value in entries.items()),
        revision=1,
    )
    assert journals_of(snapshot, keys) == {3: b"three"}
