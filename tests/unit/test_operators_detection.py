"""Failures seen look by look: exits, leases, links, and a store that says nothing or too much."""

from __future__ import annotations

import msgspec
import pytest

from dejavu.control.member import encode_json
from dejavu.ids import Epoch, IncarnationId, WorkerName
from operators import recovery
from operators.actions import FailRun, KillWorker, StartWorker, TellFenced, TellFormed
from operators.detection import Suspicion

from harness.operator_world import WALL_S, World, causes, with_standby
from harness.plans import colocated_plan

W0, W1, W2, W3 = (WorkerName(f"w{index}") for index in range(4))


def test_an_exit_is_told_with_its_signal_and_when_it_happened() -> None:
    world = World(colocated_plan(3))
    world.kill(W1)
    world.look(0.05)
    journal = world.state.journals[-1]
    (failure,) = journal.failures
    assert (failure.worker, failure.cause, failure.reason) == (W1, "exit", "died (killed by signal 9)")
    assert (failure.since_s, failure.seen_s) == (WALL_S, pytest.approx(WALL_S + 0.05))
    assert (journal.number, journal.phase) == (1, "fence")


def test_a_frozen_worker_is_dead_at_the_second_look_and_killed_behind_the_fence() -> None:
    world = World(colocated_plan(3))
    frozen = world.members.pop(W1)
    assert world.look() == ()
    assert world.state.findings == ()
    world.look(0.3)
    assert causes(world.state.journals[-1]) == [(W1, "lease")]
    assert KillWorker(name=W1) not in world.done
    assert world.look()[:2] == (KillWorker(name=W1), TellFenced(plan=world.state.plan))
    # It wakes and registers for a moment: nobody looks at that.
    world.members[W1] = frozen
    world.looks(3, after_s=0.5)
    assert len(world.state.journals[-1].failures) == 1
    assert world.repaired().phase == "done"


def test_an_exit_that_follows_the_end_of_the_lease_is_not_the_replacements() -> None:
    world = World(colocated_plan(3))
    world.members.pop(W1)
    world.look()
    world.look(0.3)
    world.kill(W1)
    world.looks()
    assert causes(world.state.journals[-1]) == [(W1, "lease")]
    assert world.state.plan.epoch == 2


def test_a_worker_that_says_it_cannot_go_on_is_replaced_before_it_ends() -> None:
    world = World(colocated_plan(3))
    world.members[W1] = msgspec.structs.replace(world.members[W1], state="draining", problem="no memory")
    world.looks()
    journal = world.state.journals[-1]
    assert causes(journal) == [(W1, "problem")]
    assert journal.failures[0].reason == "cannot go on: no memory"
    assert KillWorker(name=W1) in world.done


def test_a_worker_that_somebody_restarted_leaves_its_old_incarnation_fenced() -> None:
    """The newcomer used to be taken for the one that everybody was linked to (field report B24)."""
    world = World(colocated_plan(3))
    old = world.members[W1].incarnation
    world.members[W1] = msgspec.structs.replace(world.members[W1], incarnation=IncarnationId("by hand"))
    world.looks()
    assert [fenced.incarnation for fenced in world.state.plan.fenced] == [old]
    assert world.state.plan.epoch == 2
    world.members[W1] = msgspec.structs.replace(world.members[W1], epoch=Epoch(2))
    for name in (W0, W2):
        world.register(name, "serving")
    world.look()
    assert len(world.all_of(TellFormed)) == 1


def test_an_exit_is_the_old_incarnations_when_the_next_one_has_registered_already() -> None:
    world = World(colocated_plan(3))
    old = world.members[W1]
    world.kill(W1)
    world.members[W1] = msgspec.structs.replace(old, incarnation=IncarnationId("by hand"), pid=7)
    world.looks(2)
    assert [fenced.incarnation for fenced in world.state.plan.fenced] == [old.incarnation]
    assert world.all_of(StartWorker) == []


def test_a_wiped_store_costs_no_worker_its_place() -> None:
    """Everybody registers again; a worker that does not is dead after the long patience."""
    world = World(colocated_plan(3))
    members = dict(world.members)
    world.members.clear()
    world.plan, world.own_key_present = None, False
    world.looks(5, after_s=1.0)
    world.own_key_present = True
    world.members.update({W0: members[W0], W2: members[W2]})
    world.looks(5, after_s=1.0)
    assert world.state.journals == ()
    assert world.plan == encode_json(world.state.plan)
    world.looks(16, after_s=1.0)
    assert causes(world.state.journals[-1]) == [(W1, "lease")]


def test_an_exit_while_the_store_is_away_is_told_at_once_and_fenced_when_it_is_back() -> None:
    world = World(colocated_plan(3))
    world.is_readable = False
    world.kill(W1)
    world.looks(3, after_s=1.0)
    assert causes(world.state.journals[-1]) == [(W1, "exit")]
    assert (world.state.pending, world.state.plan.epoch) == (None, 1)
    world.is_readable = True
    world.looks(2)
    assert world.state.plan.epoch == 2


def test_a_store_that_was_away_during_a_replacement_makes_nobody_late() -> None:
    world = World(colocated_plan(3))
    world.kill(W1)
    world.looks()
    world.is_readable = False
    world.looks(5, after_s=10.0)
    world.is_readable = True
    world.look(1.0)
    assert len(world.state.journals[-1].failures) == 1


def suspect(world: World, worker: WorkerName, epoch: int) -> None:
    suspicion = Suspicion(worker=worker, epoch=Epoch(epoch), reason="reset", by="w0", since_s=world.now_s)
    world.state = recovery.suspected(world.state, suspicion)


def test_a_broken_link_of_a_living_worker_is_made_anew_and_at_the_second_time_the_worker_is_replaced() -> None:
    world = World(colocated_plan(3))
    suspect(world, W1, 1)
    suspect(world, W0, 1)
    world.look(6.4)
    assert world.state.journals == ()
    world.look(0.2)
    assert world.repaired().how == {W1: "links"}
    assert (world.state.plan.epoch, world.state.plan.fenced) == (2, ())
    assert world.all_of(KillWorker) == []
    suspect(world, W1, 2)
    world.look(6.6)
    world.looks()
    journal = world.state.journals[-1]
    assert (causes(journal), journal.how) == ([(W1, "link")], {W1: "process"})
    assert KillWorker(name=W1) in world.done


def test_links_that_break_a_minute_later_are_made_anew_again() -> None:
    world = World(colocated_plan(3))
    for epoch in (1, 2):
        suspect(world, W1, epoch)
        world.look(61.0)
        assert world.repaired().how == {W1: "links"}


def test_a_suspicion_that_an_exit_explains_is_one_failure() -> None:
    world = World(colocated_plan(3))
    suspect(world, W1, 1)
    world.kill(W1)
    world.look()
    assert world.repaired().how == {W1: "process"}
    world.looks(3, after_s=5.0)
    assert len(world.state.journals) == 1


def test_a_suspicion_of_an_old_epoch_or_a_worker_without_a_place_is_not_heard() -> None:
    world = World(with_standby(colocated_plan(2), W3))
    suspect(world, W1, 0)
    suspect(world, W3, 1)
    assert world.state.suspicions == {}


def test_a_worker_that_loses_its_lease_while_the_cluster_starts_gets_the_long_patience() -> None:
    world = World(colocated_plan(2), serve=False)
    world.look()
    world.register(W0, "starting")
    world.look()
    world.members.clear()
    world.look()
    world.look(19.0)
    assert world.all_of(FailRun) == []
    world.look(1.5)
    assert [action.worker for action in world.all_of(FailRun) if isinstance(action, FailRun)] == [W0]


def test_the_end_of_the_run_is_no_failure() -> None:
    """Workers that were told to stop give their leases back before their processes have ended."""
    world = World(colocated_plan(2))
    world.is_ending = True
    world.members.clear()
    world.looks(5, after_s=1.0)
    assert world.state.journals == ()
