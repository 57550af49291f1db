"""A repair without a new worker: the survivors must have room for the rows that they take over."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from dejavu.control.memory import Limits, check_moving, stage_memory
from dejavu.control.replan import shrunk
from dejavu.errors import InfeasibleError
from dejavu.ids import WorkerName

from harness.operator_world import World
from harness.plans import colocated_plan

W0, W1, W2 = (WorkerName(f"w{index}") for index in range(3))


@pytest.mark.parametrize(("missing_bytes", "is_over"), [(0, False), (1, True)])
def test_a_survivor_without_host_memory_for_its_rows_former_places_and_the_new_ones_ends_the_run_with_the_bytes(
    missing_bytes: int, is_over: bool
) -> None:
    plan = msgspec.structs.replace(colocated_plan(2, token_rows=4), swapping=True)
    place = plan.place_of(W0)
    assert place is not None
    # All rows in half of the layers, and then in all of them.
    limit_bytes = 3 * stage_memory(plan, place).host_kv_bytes - missing_bytes
    world = World(plan, may_grow=False)
    world.rules = dataclasses.replace(world.rules, host_memory_bytes=limit_bytes)
    world.kill(W1)
    world.looks()
    problem = world.state.problem or ""
    assert (f"w0 needs {(limit_bytes + missing_bytes) / 2**20:.1f} MiB" in problem) is is_over
    assert ("cluster.host_memory_gb gives" in problem) is is_over


@pytest.mark.parametrize(("missing_bytes", "is_over"), [(0, False), (1, True)])
def test_a_device_must_hold_the_new_places_and_gives_up_the_former_ones_rather_than_the_run(
    missing_bytes: int, is_over: bool
) -> None:
    plan = colocated_plan(2, token_rows=4)
    alone = shrunk(plan, {W1: None})
    place = alone.place_of(W0)
    assert place is not None
    world = World(plan, may_grow=False)
    limit_bytes = stage_memory(alone, place).total_bytes - missing_bytes
    world.rules = dataclasses.replace(world.rules, device_memory_bytes=limit_bytes)
    world.kill(W1)
    world.looks()
    assert (world.state.problem is not None) is is_over


def test_a_worker_that_is_new_needs_no_room_for_a_former_pool() -> None:
    plan = msgspec.structs.replace(colocated_plan(3, token_rows=4), swapping=True)
    alone = shrunk(plan, {W1: None})
    places = [place for worker in alone.workers if (place := alone.place_of(worker)) is not None]
    host_bytes = max(stage_memory(alone, place).host_kv_bytes for place in places)
    limits = Limits(host_bytes=host_bytes)
    with pytest.raises(InfeasibleError, match="while rows move, w0 needs"):
        check_moving(plan, alone, limits)
    check_moving(plan, alone, limits, fresh={W0, W2})
