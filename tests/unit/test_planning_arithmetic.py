"""The paper's formulas: values worked out by hand, and every limit where a quotient would have no denominator."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, replace

import pytest

from dejavu.planning import arithmetic
from dejavu.planning.arithmetic import Inputs
from dejavu.planning.swapping import SwapInputs, swap_rule, transfer_s

BASE = Inputs(
    num_machines=4,
    num_layers=10,
    machine_memory_bytes=1000,
    layer_weight_bytes=100,
    prompt_kv_bytes=20,
    token_kv_bytes=10,
    prompt_time_s=1.2,
    token_time_s=0.2,
    num_new_tokens=6,
    streaming_overhead=1.5,
)


def test_inverse_throughputs_are_those_of_the_paper() -> None:
    assert arithmetic.colocated_s(BASE) == pytest.approx(3 * (1.2 - 0.2) / 4 + 1.2 + 6 * 0.2)
    assert arithmetic.prompt_pipeline_s(BASE, 1) == pytest.approx(4 * 1.5 * 1.2)
    assert arithmetic.token_pipeline_s(BASE, 3) == pytest.approx(4 * 1.2 / 3)
    assert arithmetic.disaggregated_s(BASE, 1, 3) == pytest.approx(7.2)
    assert arithmetic.disaggregated_s(BASE, 3, 1) == pytest.approx(4.8)


def test_depth_bounds_are_those_of_the_paper() -> None:
    assert arithmetic.min_prompt_depth(BASE) == 2  # 10 * 120 / 1000
    assert arithmetic.min_token_depth(BASE) == 2  # 1000 / (1000 - 300)
    assert arithmetic.min_swapping_depth(BASE) == 2  # 10 * (100 + 60) / 1000


def test_memory_that_is_just_enough_is_enough_and_a_byte_less_is_not() -> None:
    assert arithmetic.min_prompt_depth(replace(BASE, machine_memory_bytes=1200)) == 1
    assert arithmetic.min_prompt_depth(replace(BASE, machine_memory_bytes=1199)) == 2
    assert arithmetic.min_token_depth(replace(BASE, machine_memory_bytes=1300)) == 1
    assert arithmetic.min_token_depth(replace(BASE, machine_memory_bytes=1299)) == 2
    assert arithmetic.min_token_depth(replace(BASE, machine_memory_bytes=301)) == 1000
    assert arithmetic.min_token_depth(replace(BASE, machine_memory_bytes=300)) is None


def test_without_a_limit_one_machine_is_enough() -> None:
    unlimited = replace(BASE, machine_memory_bytes=None)
    assert arithmetic.min_prompt_depth(unlimited) == 1
    assert arithmetic.min_token_depth(unlimited) == 1
    assert arithmetic.min_swapping_depth(unlimited) == 1


def test_at_the_equal_split_both_pipelines_take_the_same_and_all_machines_are_used() -> None:
    split = arithmetic.equal_split(BASE)
    assert split is not None
    prompt_depth, token_depth = split
    assert prompt_depth + token_depth == pytest.approx(4)
    assert 4 * 1.5 * 1.2 / prompt_depth == pytest.approx(4 * 1.2 / token_depth)
    assert arithmetic.equal_split(replace(BASE, prompt_time_s=0, token_time_s=0)) is None


def test_the_condition_is_that_the_ratio_exceeds_the_threshold() -> None:
    assert arithmetic.ratio(BASE) == pytest.approx(6)
    assert arithmetic.threshold(BASE) == pytest.approx(3 / (4 * 0.5 - 1))
    assert arithmetic.may_pay(BASE)
    assert not arithmetic.may_pay(replace(BASE, prompt_time_s=0.6))
    assert arithmetic.may_pay(replace(BASE, prompt_time_s=0.601))


@pytest.mark.parametrize(("num_machines", "overhead"), [(1, 1.0), (2, 1.5), (4, 1.75), (8, 1.875), (8, 2.0), (3, 7.0)])
def test_where_the_overhead_leaves_no_margin_there_is_no_threshold(num_machines: int, overhead: float) -> None:
    inputs = replace(BASE, num_machines=num_machines, streaming_overhead=overhead)
    assert arithmetic.threshold(inputs) is None
    assert not arithmetic.may_pay(inputs)


def test_a_step_that_takes_no_time_leaves_the_ratio_open() -> None:
    assert arithmetic.ratio(replace(BASE, token_time_s=0)) is None
    assert arithmetic.ratio(replace(BASE, token_time_s=5e-324)) is None
    assert arithmetic.may_pay(replace(BASE, token_time_s=0))


def test_a_colocated_round_takes_no_less_than_its_stages_compute() -> None:
    short = replace(BASE, prompt_time_s=0, token_time_s=1, num_new_tokens=0)
    assert arithmetic.colocated_s(short) == pytest.approx(-0.75)
    assert arithmetic.colocated_round_s(short) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"num_machines": 0},
        {"num_layers": 0},
        {"machine_memory_bytes": 0},
        {"prompt_time_s": math.nan},
        {"token_time_s": math.inf},
        {"num_new_tokens": -1},
        {"streaming_overhead": 0.99},
    ],
)
def test_letters_that_mean_nothing_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        Inputs(**{**asdict(BASE), **change})


SWAP = SwapInputs(
    rows=2, token_time_s=0.5, prompt_tokens=3, num_new_tokens=4, kv_bytes_per_token=10, pcie_bytes_per_s=200.0
)


def test_the_swap_rule_sums_the_longer_of_step_and_transfer_over_every_length() -> None:
    for rows, prompt, new, bandwidth in itertools.product((0, 1, 2, 9), (0, 1, 7), (0, 1, 30), (1.0, 40.0, 1e9)):
        inputs = replace(SWAP, rows=rows, prompt_tokens=prompt, num_new_tokens=new, pcie_bytes_per_s=bandwidth)
        rule = swap_rule(inputs)
        by_hand = sum(max(0.5, transfer_s(inputs, tokens)) for tokens in range(prompt, prompt + new + 1))
        assert rule.with_s == pytest.approx(by_hand)
        assert rule.without_s == pytest.approx(2 * new * 0.5)
        assert rule.pays == (rule.without_s >= rule.with_s and new > 0)


def test_swapping_pays_while_transfers_hide_behind_steps_and_not_beyond() -> None:
    assert swap_rule(replace(SWAP, pcie_bytes_per_s=1e6)).pays
    assert not swap_rule(replace(SWAP, pcie_bytes_per_s=20.0)).pays
    assert not swap_rule(replace(SWAP, token_time_s=0.0)).pays
