"""Repairs decided look by look: fence, replacement, and what goes wrong on the way."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from dejavu.control.member import encode_json
from dejavu.control.plan import Fenced
from dejavu.ids import Epoch, WorkerName
from operators import recovery
from operators.actions import FailRun, KillWorker, StartWorker, TellFenced, TellFormed

from harness.operator_world import RECEIPT, World, causes, with_standby
from harness.plans import colocated_plan, split_plan

W0, W1, W2, W3 = (WorkerName(f"w{index}") for index in range(4))


def test_a_dead_worker_is_fenced_before_anything_else_happens() -> None:
    world = World(colocated_plan(3))
    dead = world.members[W1].incarnation
    world.kill(W1)
    assert world.look() == ()
    assert world.state.plan.epoch == 1
    assert world.look() == (TellFenced(plan=world.state.plan), StartWorker(name=W1))
    assert world.state.plan.epoch == 2
    assert world.state.plan.fenced == (Fenced(worker=W1, incarnation=dead),)


def test_a_repair_goes_through_its_phases_and_ends_when_the_controller_says_so() -> None:
    world = World(colocated_plan(3))
    phases = []
    world.kill(W1)
    for _ in range(2):
        world.look()
        phases.append(world.state.journals[-1].phase)
    world.serve()
    world.look()
    phases.append(world.state.journals[-1].phase)
    (formed,) = world.all_of(TellFormed)
    assert isinstance(formed, TellFormed)
    assert formed.addresses[W1] == f"w1:{world.pids[W1]}"
    world.looks()
    assert world.all_of(TellFormed) == [formed]
    world.state = recovery.resumed(world.state, Epoch(2), RECEIPT)
    assert [*phases, world.state.journals[-1].phase] == ["fence", "replace", "restore", "done"]
    assert world.state.journal is None
    assert world.state.journals[-1].receipt == RECEIPT


def test_a_word_of_the_controller_on_an_epoch_that_was_left_is_not_heard() -> None:
    world = World(colocated_plan(3))
    world.kill(W1)
    world.looks()
    world.serve()
    world.look()
    assert recovery.resumed(world.state, Epoch(1), RECEIPT) == world.state
    world.kill(W2)
    world.look()
    assert recovery.resumed(world.state, Epoch(2), RECEIPT) == world.state


def test_a_standby_that_waits_comes_first_and_the_dead_name_waits_for_the_next_failure() -> None:
    world = World(with_standby(colocated_plan(3), W3))
    world.kill(W1)
    world.looks(2)
    assert world.state.plan.workers == (W0, W3, W2)
    assert world.state.plan.standby == (W1,)
    # Loading a process would slow the repair down.
    assert world.all_of(StartWorker) == []
    journal = world.repaired()
    assert (journal.how, journal.replaced_by) == ({W1: "standby"}, {W1: W3})
    world.look()
    assert world.all_of(StartWorker) == [StartWorker(name=W1)]


def test_a_standby_that_still_loads_comes_before_a_process_that_has_not_begun() -> None:
    world = World(with_standby(colocated_plan(3), W3))
    world.register(W3, "starting", placed=False)
    world.kill(W1)
    world.looks()
    assert world.state.plan.workers == (W0, W3, W2)


def test_a_standby_that_is_dead_is_passed_over_for_a_process() -> None:
    world = World(with_standby(colocated_plan(3), W3))
    world.kill(W3)
    world.kill(W1)
    world.looks()
    assert world.state.plan.workers == (W0, W1, W2)


def test_a_cluster_that_may_not_grow_waits_for_a_loading_standby() -> None:
    world = World(with_standby(colocated_plan(3), W3), may_grow=False)
    world.register(W3, "starting", placed=False)
    world.kill(W1)
    world.looks()
    assert (world.state.plan.workers, world.state.plan.standby) == ((W0, W3, W2), ())


def test_a_cluster_that_may_not_grow_cuts_the_layers_anew() -> None:
    world = World(colocated_plan(3), may_grow=False)
    world.kill(W1)
    world.looks()
    assert world.state.plan.workers == (W0, W2)
    assert world.state.plan.epoch == 2
    assert world.repaired().how == {W1: "replan"}
    assert world.all_of(StartWorker) == []


def test_a_dead_standby_is_no_survivor() -> None:
    world = World(with_standby(colocated_plan(2), W3), may_grow=False)
    world.kill(W3)
    world.look()
    world.kill(W1)
    world.looks()
    assert world.state.plan.workers == (W0,)


def test_a_standby_that_dies_together_with_a_stage_takes_no_place() -> None:
    world = World(with_standby(colocated_plan(3), W3))
    world.kill(W1, forget=False)
    world.kill(W3, forget=False)
    world.looks(2)
    assert world.state.plan.workers == (W0, W1, W2)
    assert world.repaired().how == {W1: "process"}


def test_a_run_without_survivors_ends_with_the_worker_and_the_reason() -> None:
    world = World(colocated_plan(2), may_grow=False)
    world.kill(W0)
    world.kill(W1)
    world.look()
    (action,) = world.all_of(FailRun)
    assert isinstance(action, FailRun)
    assert action.worker == W0
    assert "w0 died (killed by signal 9) and nobody can take its place: " in action.reason
    assert world.state.journals[-1].phase == "failed"
    world.looks()
    assert world.all_of(FailRun) == [action]


def test_failures_of_one_look_are_one_repair() -> None:
    world = World(with_standby(split_plan(1, 3), WorkerName("w4")))
    world.kill(W1)
    world.kill(W3)
    world.looks()
    journal = world.state.journals[-1]
    assert causes(journal) == [(W1, "exit"), (W3, "exit")]
    assert journal.how == {W1: "standby", W3: "process"}
    assert world.state.plan.epoch == 2


@pytest.mark.parametrize("num_looks", [1, 2, 3])
def test_a_failure_during_a_repair_is_fenced_within_it(num_looks: int) -> None:
    """Before the fence is in, while the worker is replaced, and while rows are restored."""
    world = World(colocated_plan(3))
    world.kill(W1)
    world.looks(num_looks)
    if num_looks == 3:
        world.serve()
        world.look()
    world.kill(W2)
    world.looks()
    journal = world.state.journals[-1]
    assert causes(journal) == [(W1, "exit"), (W2, "exit")]
    assert (journal.number, journal.epoch, world.state.plan.epoch) == (1, 3, 3)
    assert world.repaired().phase == "done"


def test_a_decided_plan_is_not_changed_while_it_may_be_in_the_store() -> None:
    """The answer to a put may be lost: two different plans of one epoch would both have been given out."""
    world = World(colocated_plan(3))
    world.takes_plans = False
    world.kill(W1)
    world.look()
    first = world.state.pending
    world.kill(W2)
    world.looks()
    assert world.state.pending == first
    world.takes_plans = True
    world.looks(2)
    assert world.state.plan == first
    world.looks(2)
    assert world.state.plan.epoch == 3


def test_a_replacement_that_dies_again_and_again_is_given_up_after_four_starts() -> None:
    world = World(colocated_plan(3))
    world.kill(W1)
    for _ in range(200):
        world.look(0.1)
        if W1 in world.running:
            world.kill(W1)
    assert len(world.all_of(StartWorker)) == 4
    assert world.state.plan.workers == (W0, W2)
    assert world.state.journals[-1].how == {W1: "replan"}


def test_a_worker_that_does_not_serve_in_time_is_replaced_and_its_process_killed() -> None:
    world = World(colocated_plan(3))
    world.kill(W1)
    world.looks()
    world.register(W0, "ready")
    world.register(W2, "ready")
    hung = world.pids[W1]
    world.look(30.5)
    world.looks()
    journal = world.state.journals[-1]
    assert causes(journal) == [(W1, "exit"), (W1, "problem")]
    assert journal.failures[-1].reason == "did not serve in 30 s"
    assert KillWorker(name=W1) in world.done
    world.look(1.0)
    assert world.pids[W1] != hung


def test_a_worker_that_has_no_process_yet_is_not_late_until_it_could_have_come() -> None:
    """Where Ray has no room its place waits; it used to be asked for anew again and again."""
    world = World(colocated_plan(3))
    world.kill(W1)
    world.looks()
    begun, world.pids[W1] = world.pids[W1], -1
    for name in (W0, W2):
        world.register(name, "ready")
    world.looks(10, after_s=30.0)
    assert (world.state.plan.epoch, world.all_of(KillWorker)) == (2, [])
    world.pids[W1] = begun
    world.look(29.0)
    assert world.state.is_fenced
    world.look(2.0)
    assert causes(world.state.journals[-1]) == [(W1, "exit"), (W1, "problem")]


def test_a_dead_standby_is_started_again_without_a_new_epoch() -> None:
    world = World(with_standby(colocated_plan(2), W3))
    world.kill(W3, forget=False)
    world.look()
    assert world.all_of(StartWorker) == [StartWorker(name=W3)]
    assert (world.state.plan.epoch, world.state.journals) == (1, ())


def test_a_frozen_standby_is_killed_and_started_again() -> None:
    world = World(with_standby(colocated_plan(2), W3))
    world.members.pop(W3)
    world.look()
    world.look(0.3)
    world.looks(2)
    assert [type(action) for action in world.done if isinstance(action, KillWorker | StartWorker)] == [
        KillWorker,
        StartWorker,
    ]
    assert world.state.plan.epoch == 1


@pytest.mark.parametrize("victim", [W1, W3], ids=["stage", "standby"])
def test_before_the_cluster_has_served_a_failure_ends_the_run(victim: WorkerName) -> None:
    """A broken configuration would be started again and again."""
    world = World(with_standby(colocated_plan(2), W3), serve=False)
    world.look()
    world.kill(victim)
    world.look()
    (action,) = world.all_of(FailRun)
    assert action == FailRun(reason=f"worker {victim} died (killed by signal 9)", worker=victim)


def test_the_cluster_is_formed_for_the_first_time_when_its_standbys_wait_too() -> None:
    world = World(with_standby(colocated_plan(2), W3), serve=False)
    world.look()
    world.serve()
    world.register(W3, "starting", placed=False)
    world.look()
    assert not world.state.has_served
    world.register(W3, "ready", placed=False)
    world.look()
    assert world.state.has_served
    (formed,) = world.all_of(TellFormed)
    assert isinstance(formed, TellFormed)
    assert (formed.plan.epoch, set(formed.addresses)) == (1, {W0, W1})


def test_a_cluster_that_keeps_failing_is_given_up() -> None:
    world = World(colocated_plan(3))
    for index in range(recovery.MAX_REPAIRS):
        world.kill((W0, W1, W2)[index % 3])
        world.state = dataclasses.replace(world.state, starts={})
        world.repaired()
    assert world.all_of(FailRun) == []
    world.kill(W1)
    world.look()
    (action,) = world.all_of(FailRun)
    assert isinstance(action, FailRun)
    assert "keeps failing" in action.reason


def test_a_plan_of_another_controller_ends_the_run() -> None:
    world = World(colocated_plan(2))
    world.plan = encode_json(msgspec.structs.replace(world.state.plan, epoch=Epoch(7)))
    world.look()
    (action,) = world.all_of(FailRun)
    assert isinstance(action, FailRun)
    assert "epoch 7" in action.reason
