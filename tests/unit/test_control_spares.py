"""Replication, recovery and standbys, from the declaration to the plan and to plan.json."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dejavu.control.placement import Declared, check_shape, place
from dejavu.control.summary import summary
from dejavu.errors import ConfigError
from dejavu.ids import Epoch
from dejavu.workflows.preparation import declared

from harness.cluster_kit import configured
from harness.plans import made_up_spec

SPLIT = Declared(
    mode="disaggregated", prompt_depth=1, token_depth=3, prompt_rows=2, token_rows=2, scheduling="row",
    replication=2, recovery="recompute", num_standby=2,
)  # fmt: skip


def test_standbys_are_named_after_the_workers_that_have_a_place() -> None:
    plan = place(SPLIT, made_up_spec(), epoch=Epoch(1))
    assert plan.workers == ("w0", "w1", "w2", "w3")
    assert plan.standby == ("w4", "w5")
    with_memory = place(replace(SPLIT, stream_to="memory", num_standby=1), made_up_spec(), epoch=Epoch(1))
    assert with_memory.memory_stages[0].worker == "w4"
    assert with_memory.standby == ("w5",)


def test_the_plan_says_how_often_rows_are_copied_and_how_they_recover() -> None:
    plan = place(SPLIT, made_up_spec(), epoch=Epoch(1))
    assert (plan.replication, plan.recovery) == (2, "recompute")
    said = json.loads(json.dumps(summary(plan)))
    assert (said["replication"], said["recovery"], said["standby"]) == (2, "recompute", ["w4", "w5"])


def test_as_many_copies_as_stages_are_refused_with_both_numbers() -> None:
    for refused in (3, -1):
        with pytest.raises(ConfigError, match=rf"strategy\.replication={refused}: must be from 0 to 2"):
            check_shape(replace(SPLIT, replication=refused), 6)


def test_a_colocated_plan_counts_its_own_stages() -> None:
    colocated = Declared(
        mode="colocated", colocated_depth=2, token_depth=9, prompt_rows=2, token_rows=2, scheduling="row", replication=1
    )
    plan = place(colocated, made_up_spec(), epoch=Epoch(1))
    assert [stage.worker for stage in plan.successors_of(plan.workers[1])] == ["w0"]
    with pytest.raises(ConfigError, match="from 0 to 1"):
        place(replace(colocated, replication=2), made_up_spec(), epoch=Epoch(1))


def test_too_few_workers_for_the_standbys_are_refused_with_the_number_that_is_enough() -> None:
    check_shape(replace(SPLIT, num_workers=6), 6)
    with pytest.raises(ConfigError, match=r"strategy\.standby=2 need 6 workers, but cluster\.num_workers=5"):
        check_shape(replace(SPLIT, num_workers=5), 6)


def test_what_the_user_declares_is_what_the_plan_is_made_from() -> None:
    made = declared(
        configured(
            "strategy.split.token=2", "strategy.replication=1", "strategy.recovery=restart", "strategy.standby=3"
        )
    )
    assert (made.replication, made.recovery, made.num_standby) == (1, "restart", 3)
