"""A cluster whose workers somebody else starts: its operator waits for them, and tells whom it waits for."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from dejavu.ids import WorkerName
from operators.actions import FailRun, Say, TellFormed

from harness.made_up_launcher import member
from harness.operator_world import World, causes
from harness.plans import colocated_plan

W0, W1 = WorkerName("w0"), WorkerName("w1")


def by_hand(*, may_grow: bool = True) -> World:
    """Nobody has come yet."""
    world = World(colocated_plan(2), may_grow=may_grow, serve=False)
    world.rules = replace(world.rules, starts_processes=False)
    world.look()
    return world


def come(world: World, *names: WorkerName, incarnation: str = "first") -> None:
    """These workers, which nobody here has started, serve in the plan in force."""
    for name in names:
        epoch = world.state.plan.epoch
        world.members[name] = member(name, epoch=epoch, incarnation=f"{name} {incarnation}")


def said(world: World) -> list[str]:
    return [action.text for action in world.all_of(Say) if isinstance(action, Say)]


def test_a_worker_that_ends_while_the_cluster_starts_is_waited_for_as_before_it_came() -> None:
    """Ended by hand and started again with other arguments, it used to end the whole run after 20 s."""
    world = by_hand()
    come(world, W1)
    world.look()
    world.members.clear()
    world.looks(10, after_s=10.0)
    assert world.all_of(FailRun) == []
    assert said(world) == [f"worker {name} is to be started elsewhere" for name in (W0, W1, W1)]
    come(world, W0, W1, incarnation="second")
    world.look()
    assert len(world.all_of(TellFormed)) == 1


def test_a_worker_that_says_why_it_cannot_begin_ends_the_run() -> None:
    world = by_hand()
    world.members[W1] = msgspec.structs.replace(member(W1, "draining"), problem="no such model")
    world.look()
    assert [action.reason for action in world.all_of(FailRun) if isinstance(action, FailRun)] == [
        "worker w1 cannot go on: no such model"
    ]


def test_a_worker_that_fails_again_and_again_keeps_its_place_and_each_time_people_are_told() -> None:
    """Starts that nobody made used to be counted: after four of them its layers went to the others for good."""
    world = by_hand()
    come(world, W0, W1)
    world.look()
    for number in range(2, 8):
        del world.members[W1]
        world.looks(4, after_s=0.2)
        # As long as a supervisor's pause.
        world.looks(5, after_s=1.0)
        come(world, W0)
        come(world, W1, incarnation=f"{number}")
        world.look()
        world.resume()
    assert {tuple(journal.how.items()) for journal in world.state.journals} == {((W1, "process"),)}
    assert [causes(journal) for journal in world.state.journals] == [[(W1, "lease")]] * 6
    assert world.state.plan.workers == (W0, W1)
    to_start = [f"worker {name} is to be started elsewhere" for name in (W0, W1)]
    assert said(world) == [*to_start, *[to_start[1]] * 6]


def test_a_place_waits_for_as_long_as_nobody_comes_and_for_the_start_timeout_once_somebody_has() -> None:
    world = by_hand()
    come(world, W0, W1)
    world.look()
    del world.members[W1]
    world.looks(4, after_s=0.2)
    world.members[W0] = member(W0, "ready", epoch=2, incarnation="w0 first")
    world.looks(10, after_s=100.0)
    assert (world.state.plan.epoch, causes(world.state.journals[-1])) == (2, [(W1, "lease")])
    world.members[W1] = member(W1, "starting", epoch=1, incarnation="w1 second")
    world.look(29.0)
    world.look(2.0)
    assert causes(world.state.journals[-1]) == [(W1, "lease"), (W1, "problem")]


@pytest.mark.parametrize("may_grow", [True, False])
def test_whether_a_dead_workers_layers_go_to_the_others_is_for_the_declaration_to_say(may_grow: bool) -> None:
    world = by_hand(may_grow=may_grow)
    come(world, W0, W1)
    world.look()
    del world.members[W1]
    world.looks(4, after_s=0.2)
    assert world.state.plan.workers == ((W0, W1) if may_grow else (W0,))
