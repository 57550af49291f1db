"""When a cluster swaps by itself, and what it says before it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dejavu.config import Config, WorkflowName
from dejavu.config.strategy import Swapping
from dejavu.config.swapping_check import check_swapping
from dejavu.control.memory import Limits, check_memory, fits, most_rows, stage_memory
from dejavu.control.placement import Declared, place
from dejavu.control.plan import Plan
from dejavu.errors import ConfigError, InfeasibleError
from dejavu.ids import Epoch
from dejavu.planning.memory import memory_table
from dejavu.planning.memory import most_rows as planned_most_rows
from dejavu.planning.search import plan
from dejavu.planning.swap_choice import SwapKnown, choose_swapping
from dejavu.planning.swapping import SwapInputs

from harness.planning_kit import asked
from harness.plans import made_up_spec

ROWS, IN_FLIGHT = 8, 4


def known(*, gigabytes_per_s: float) -> SwapKnown:
    inputs = SwapInputs(
        rows=ROWS, token_time_s=0.1, prompt_tokens=500, num_new_tokens=500, kv_bytes_per_token=10**6,
        pcie_bytes_per_s=gigabytes_per_s * 1e9,
    )  # fmt: skip
    return SwapKnown(inputs=inputs)


def plan_of(**others: object) -> Plan:
    values = {"mode": "colocated", "colocated_depth": 2, "prompt_rows": 2, "token_rows": ROWS, "scheduling": "row"}
    return place(Declared(**{**values, "in_flight": IN_FLIGHT, **others}), made_up_spec(), epoch=Epoch(1))  # type: ignore[arg-type]


def test_nothing_swaps_where_no_memory_is_declared_or_everything_fits() -> None:
    assert not choose_swapping(rows=8, most_resident=None, most_swapped=None).swapping
    choice = choose_swapping(rows=8, most_resident=9, most_swapped=18)
    assert not choice.swapping
    assert "fits; 9 rows would, too" in choice.reason


def test_rows_that_fit_only_in_slots_are_swapped_with_the_rules_two_sides_as_the_reason() -> None:
    choice = choose_swapping(rows=8, most_resident=4, most_swapped=8, known=known(gigabytes_per_s=1000))
    assert choice.swapping
    assert choice.rule is not None
    assert choice.rule.pays
    assert "it pays: 2Nt is 100 s, with transfers 50.1 s" in choice.reason
    assert choice.warning is None


def test_copies_that_take_longer_than_steps_are_warned_of() -> None:
    choice = choose_swapping(rows=8, most_resident=4, most_swapped=8, known=known(gigabytes_per_s=10))
    assert choice.swapping
    assert choice.rule is not None
    assert not choice.rule.pays
    assert choice.warning is not None
    assert "4 rows without swapping would be faster" in choice.warning


def test_where_times_or_bandwidth_are_unknown_the_reason_says_what_the_rule_lacks() -> None:
    choice = choose_swapping(rows=8, most_resident=4, most_swapped=8)
    assert choice.swapping
    assert "whether it pays is unknown without the time of a step" in choice.reason


def test_a_stage_that_swaps_has_two_microbatches_on_its_device_and_all_in_its_host() -> None:
    for made, on_device, in_host in ((plan_of(), IN_FLIGHT, 0), (plan_of(swapping=True), 2, IN_FLIGHT)):
        for worker in made.workers:
            found = made.place_of(worker)
            assert found is not None
            memory = stage_memory(made, found)
            microbatch = ROWS * made.model.layout.row_bytes(len(found.stage.layers))
            assert (memory.kv_bytes, memory.host_kv_bytes) == (on_device * microbatch, in_host * microbatch)


@pytest.mark.parametrize("swapping", [False, True])
def test_the_most_rows_fit_and_one_more_does_not(swapping: bool) -> None:
    made = plan_of(swapping=swapping)
    weights = max(stage_memory(made, found).weight_bytes for worker in made.workers if (found := made.place_of(worker)))
    row = made.model.layout.row_bytes(max(len(stage.layers) for stage in made.token_pipeline.stages))
    limits = Limits(device_bytes=weights + 23 * row)
    most = most_rows(made, limits, swapping=swapping)
    assert most is not None
    assert most >= (23 // 2 if swapping else 23 // IN_FLIGHT)
    assert fits(plan_of(swapping=swapping, token_rows=most), limits)
    assert not fits(plan_of(swapping=swapping, token_rows=most + 1), limits)


def test_what_does_not_fit_is_refused_with_the_largest_microbatch_of_both_ways() -> None:
    made = plan_of()
    weights = max(stage_memory(made, found).weight_bytes for one in made.workers if (found := made.place_of(one)))
    row = made.model.layout.row_bytes(max(len(stage.layers) for stage in made.token_pipeline.stages))
    with pytest.raises(
        InfeasibleError, match=r"at most 5 with strategy.swapping=off, and 10 with strategy.swapping=on"
    ):
        check_memory(made, Limits(device_bytes=weights + 20 * row))


def test_a_host_store_that_is_too_large_is_refused() -> None:
    made = plan_of(swapping=True)
    row = made.model.layout.row_bytes(max(len(stage.layers) for stage in made.token_pipeline.stages))
    check_memory(made, Limits(host_bytes=ROWS * IN_FLIGHT * row))
    with pytest.raises(InfeasibleError, match=r"of KV in host memory, but cluster.host_memory_gb gives"):
        check_memory(made, Limits(host_bytes=ROWS * IN_FLIGHT * row - 1))


@pytest.mark.parametrize(
    ("workflow", "swapping", "advice"),
    [
        ("recovery", "auto", "workflow=recovery takes on or off"),
        ("simulate", "on", "workflow=simulate takes simulate.swapping=true"),
    ],
)
def test_workflows_that_cannot_decide_refuse_to(workflow: str, swapping: str, advice: str) -> None:
    config = Config()
    config.workflow.name, config.strategy.swapping = WorkflowName[workflow], Swapping[swapping]
    with pytest.raises(ConfigError, match=advice):
        check_swapping(config)


@pytest.mark.parametrize("swapping", [False, True])
def test_the_planners_most_rows_fit_its_own_table_and_one_more_does_not(swapping: bool) -> None:
    question = asked(memory_bytes=10**6)
    answer = plan(question)
    assert answer.chosen is not None
    most = planned_most_rows(question, answer.chosen, swapping=swapping)
    assert most is not None
    for rows, is_enough in ((most, True), (most + 1, False)):
        candidate = replace(answer.chosen, rows=rows, swapping=swapping)
        assert all(stage.fits for stage in memory_table(question, candidate)) is is_enough


def test_a_host_with_little_memory_limits_the_planners_swapped_rows() -> None:
    question = asked(memory_bytes=10**9)
    answer = plan(question)
    assert answer.chosen is not None
    (stage, *_) = memory_table(question, replace(answer.chosen, rows=1, swapping=True))
    small = replace(question, machines=replace(question.machines, host_memory_bytes=5 * stage.host_kv_bytes))
    assert planned_most_rows(small, answer.chosen, swapping=True) == 5
