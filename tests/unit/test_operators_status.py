"""What people are told of a cluster: conditions, journals, and lines of the log."""

from __future__ import annotations

import dataclasses

import msgspec

from dejavu.control.journal import Failure, RepairJournal, RestoreReceipt
from dejavu.control.member import Member, encode_json
from dejavu.ids import Epoch, IncarnationId, WorkerName
from operators import journals, membership, status
from operators.actions import DropJournal, PutJournal, PutStatus
from operators.membership import Attendance
from operators.observation import Observed
from operators.repair_state import RepairState

from harness.made_up_launcher import member
from harness.plans import colocated_plan

W0, W1 = WorkerName("w0"), WorkerName("w1")
DESIRED = (W0, W1)
PLAN = colocated_plan(2)
NOBODY: frozenset[IncarnationId] = frozenset()


def observed(*members: Member, stored: dict[int, bytes] | None = None) -> Observed:
    return Observed(
        members={member.name: member for member in members},
        plan=None,
        spec=None,
        running=frozenset(),
        journals=stored or {},
    )


def unreadable() -> Observed:
    return Observed(members=None, plan=None, spec=None, running=frozenset())


def state_of(seen: Observed, before: RepairState | None = None, **changes: object) -> RepairState:
    """The state in which this was seen."""
    before = before or RepairState(plan=PLAN, attendance=Attendance())
    attendance = membership.attend(before.attendance, seen, 0.0, names=DESIRED, gone=NOBODY, patience_s=5.0)
    return dataclasses.replace(before, attendance=attendance, **changes)  # type: ignore[arg-type]


def test_conditions_go_from_starting_to_ready_to_degraded_and_keep_their_times() -> None:
    seen = observed(member(W0))
    starting = status.conditions(state_of(seen), seen, {}, 1.0)
    assert (starting["Ready"].status, starting["Ready"].reason) == (False, "no worker w1")
    assert (starting["Degraded"].status, starting["Degraded"].reason) == (False, "starting")
    seen = observed(member(W0), member(W1))
    ready = status.conditions(state_of(seen), seen, starting, 2.0)
    assert (ready["Ready"].status, ready["Ready"].since_s) == (True, 2.0)
    assert not ready["Degraded"].status
    seen = observed(member(W0), member(W1, "draining"))
    served = state_of(seen, has_served=True)
    degraded = status.conditions(served, seen, ready, 3.0)
    assert (degraded["Degraded"].status, degraded["Degraded"].reason) == (True, "w1 is draining")
    later = status.conditions(served, seen, degraded, 4.0)
    assert later == degraded
    assert later["Repairing"].since_s == 1.0


def test_a_lease_that_has_just_run_out_is_shown_before_anybody_acts_on_it() -> None:
    served = state_of(observed(member(W0), member(W1)), has_served=True)
    seen = observed(member(W0))
    shown = status.conditions(state_of(seen, served), seen, {}, 1.0)
    assert (shown["Ready"].status, shown["Degraded"].reason) == (False, "no worker w1")


def test_a_repair_is_shown_with_who_died_of_what_and_its_phase_also_without_a_store() -> None:
    """Readiness used to stay true after a worker had died (field report B34)."""
    served = state_of(observed(member(W0), member(W1)), has_served=True, journal=JOURNAL)
    shown = status.conditions(served, unreadable(), {}, 1.0)
    reason = "w1 died (killed by signal 9): replace"
    assert {name: (now.status, now.reason) for name, now in shown.items()} == {
        "Ready": (False, reason),
        "Degraded": (True, reason),
        "Repairing": (True, reason),
    }
    over = dataclasses.replace(served, journal=None)
    shown = status.conditions(over, observed(member(W0), member(W1)), shown, 2.0)
    assert [now.status for now in shown.values()] == [True, False, False]


def test_a_run_that_cannot_go_on_is_shown_as_such() -> None:
    shown = status.conditions(state_of(observed(), problem="worker w0 died"), unreadable(), {}, 1.0)
    assert (shown["Ready"].status, shown["Ready"].reason) == (False, "worker w0 died")


def test_an_unreadable_store_leaves_the_conditions_as_they_were() -> None:
    before = status.conditions(state_of(observed(member(W0))), observed(member(W0)), {}, 1.0)
    assert status.conditions(state_of(unreadable()), unreadable(), before, 2.0) is before


def test_the_status_is_put_only_when_a_condition_has_changed() -> None:
    before = status.conditions(state_of(observed()), observed(), {}, 1.0)
    assert status.decide(before, dict(before)) == ()
    (action,) = status.decide({}, before)
    assert isinstance(action, PutStatus)
    assert msgspec.json.decode(action.value)["Ready"]["status"] is False


DIED = Failure(
    worker=W1,
    incarnation=IncarnationId("i"),
    cause="exit",
    reason="died (killed by signal 9)",
    seen_s=10.01,
    since_s=10.0,
)
JOURNAL = RepairJournal(
    number=1,
    epoch=Epoch(2),
    failures=(DIED,),
    how={W1: "standby"},
    replaced_by={W1: WorkerName("w2")},
    phase="replace",
    fenced_s=10.05,
)
DONE = msgspec.structs.replace(
    JOURNAL,
    phase="done",
    replaced_s=10.36,
    receipt=RestoreReceipt(
        restored_s=10.4, resumed_s=10.5, rows={"replica": 2}, resume_steps={0: 14}, steps_recomputed={0: 1}
    ),
)


def test_the_newest_journals_are_kept_in_the_store_and_old_ones_leave_it() -> None:
    many = [msgspec.structs.replace(JOURNAL, number=number) for number in range(1, journals.KEPT + 2)]
    stored = {journal.number: encode_json(journal) for journal in many[:-1]}
    newest = PutJournal(number=many[-1].number, value=encode_json(many[-1]))
    assert journals.decide(many, observed(stored=stored)) == (newest, DropJournal(number=1))
    kept = {journal.number: encode_json(journal) for journal in many[1:]}
    assert journals.decide(many, observed(stored=kept)) == ()
    assert journals.decide(many, unreadable()) == ()


def test_a_journal_that_has_changed_is_news() -> None:
    second = msgspec.structs.replace(JOURNAL, number=2)
    assert journals.news((), (JOURNAL,)) == (JOURNAL,)
    assert journals.news((JOURNAL,), (JOURNAL,)) == ()
    assert journals.news((JOURNAL,), (DONE, second)) == (DONE, second)


def test_the_log_tells_a_repair_in_a_line_for_each_phase() -> None:
    begun = msgspec.structs.replace(JOURNAL, phase="fence", fenced_s=None)
    assert journals.told(None, begun) == ("repair 1: w1 died (killed by signal 9), seen 0.01 s after",)
    assert journals.told(begun, JOURNAL) == ("repair 1: fenced, epoch 2",)
    assert journals.told(JOURNAL, DONE) == (
        "repair 1: w1 is replaced by w2 (standby) in 0.31 s",
        "repair 1: rows restored in 0.04 s (2 by replica)",
        "repair 1: resumed at step 14, 1 step made again",
    )
    assert journals.told(DONE, DONE) == ()
