"""The choice among candidates: as good as trying everything, and never an error instead of a no."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from dejavu.planning.document import document, warnings
from dejavu.planning.memory import memory_table
from dejavu.planning.prediction import predict
from dejavu.planning.search import Answer, plan

from harness.planning_by_hand import ways
from harness.planning_kit import asked

LAYER_BYTES = 1000
KV_BYTES = 24 * 4 * 200 * 8
"""Of a microbatch of four rows, 100 + 100 tokens, in all layers."""


def numbers(value: object) -> Iterator[float]:
    """Every number of a document."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, float):
        yield value


GRID = list(
    itertools.product(
        (1, 2, 3, 8),
        (0.0, 1e-7, 0.0013, 1.307, 300.0),
        (0.0, 1e-7, 0.035, 1.5),
        (0, 1, 200),
        (1.0, 1.1, 1.5, 1.875, 2.0, 3.0),
        (1, LAYER_BYTES, KV_BYTES, KV_BYTES + 3000, KV_BYTES + 24 * LAYER_BYTES, None),
    )
)


@pytest.mark.parametrize("machines", [1, 2, 3, 8])
def test_b32_the_whole_grid_is_answered_with_numbers(machines: int) -> None:
    for count, prompt_s, token_s, new_tokens, overhead, memory_bytes in GRID:
        if count != machines:
            continue
        answer = plan(
            asked(
                num_machines=count,
                prompt_s=prompt_s,
                token_s=token_s,
                new_tokens=new_tokens,
                overhead=overhead,
                memory_bytes=memory_bytes,
            )
        )
        assert all(math.isfinite(number) for number in numbers(msgspec.to_builtins(document(answer))))
        if answer.chosen is None:
            assert answer.reason.startswith("infeasible because")
            assert any(letter.isdigit() for letter in answer.reason)
            assert len(answer.reason.splitlines()) <= 3
            continue
        if answer.chosen.mode == "disaggregated":
            assert answer.reason.startswith("disaggregate:")
            assert answer.formulas.may_pay
            assert answer.chosen.prompt_depth >= 1
            assert answer.chosen.token_depth >= 1
            assert answer.chosen.num_machines <= count
        else:
            assert answer.reason.startswith("do not disaggregate")


@pytest.mark.parametrize("machines", range(1, 9))
def test_the_choice_is_as_good_as_trying_everything_by_hand(machines: int) -> None:
    draw = random.Random(machines)
    outcomes = set()
    for _ in range(150):
        question = asked(
            num_machines=machines,
            prompt_s=draw.choice((0.0, 0.0013, 1.307, 2.0, 300.0)),
            token_s=draw.choice((0.0, 1e-7, 0.035, 1.5)),
            new_tokens=draw.choice((1, 30, 200)),
            overhead=draw.choice((1.0, 1.1, 1.5, 2.0, 3.0)),
            # From less than the weights of two layers to all of a long microbatch's KV.
            memory_bytes=draw.choice((None, *(int(3000 * 1.4**power) for power in range(14)))),
            host_bytes=draw.choice((None, 200_000)),
            pcie_gbps=draw.choice((None, 1e-3, 1.0, 1000.0)),
            num_layers=draw.choice((3, 24)),
        )
        chosen, by_hand = plan(question).chosen, ways(question)
        assert (chosen is None) == (not by_hand)
        if chosen is None:
            outcomes.add("infeasible")
            continue
        outcomes.add(chosen.mode + (", swapping" if chosen.swapping else ""))
        assert chosen.row_s == pytest.approx(min(way.row_s for way in by_hand))
        prompt = 0 if chosen.mode == "colocated" else chosen.prompt_depth
        mine = (prompt, chosen.token_depth, chosen.rows, chosen.swapping)
        assert mine in {(way.prompt, way.token, way.rows, way.swapping) for way in by_hand}
    assert {"infeasible", "colocated"} <= outcomes
    if machines > 2:
        assert {"disaggregated", "colocated, swapping"} <= outcomes


def test_the_reference_planners_failing_example_gets_an_answer() -> None:
    """Four machines, Y 1307 ms, t 35 ms, 200 tokens: rounding finds no split there."""
    answer = plan(asked(prompt_s=1.307, token_s=0.035, new_tokens=200))
    assert answer.chosen is not None
    assert answer.chosen.mode == "colocated"
    assert answer.runners_up[0].label == "1 + 3"
    assert answer.runners_up[0].round_s == pytest.approx(4 * 200 * 0.035 / 3)


def test_long_prompts_and_short_answers_are_split() -> None:
    answer = plan(asked(num_machines=4, prompt_s=2.417, token_s=0.0568, new_tokens=60))
    assert answer.chosen is not None
    assert (answer.chosen.mode, answer.chosen.prompt_depth, answer.chosen.token_depth) == ("disaggregated", 2, 2)
    assert answer.formulas.prompt_depth == 2


def test_machines_beyond_the_models_layers_stay_idle_and_are_named() -> None:
    answer = plan(asked(num_machines=9, num_layers=3))
    assert answer.chosen is not None
    assert answer.chosen.num_machines <= 6
    assert "stay idle" in " ".join(warnings(answer))


def test_the_swap_rule_is_told_only_where_the_bandwidth_to_the_host_is_known() -> None:
    assert plan(asked()).swap is None
    fast, slow = plan(asked(pcie_gbps=1000.0)).swap, plan(asked(pcie_gbps=1e-6)).swap
    assert fast is not None
    assert fast.pays
    assert slow is not None
    assert not slow.pays


def objections(answer: Answer) -> str:
    return " ".join(one.objection or "" for one in answer.refused)


def test_nothing_is_swapped_where_everything_fits_without() -> None:
    for memory_bytes in (None, 10**9):
        answer = plan(asked(pcie_gbps=1000.0, memory_bytes=memory_bytes))
        assert answer.chosen is not None
        assert not answer.chosen.swapping
        assert "8 rows fits without swapping" in objections(answer)


def test_nothing_is_swapped_where_two_microbatches_are_in_flight() -> None:
    answer = plan(asked(num_machines=2, new_tokens=100, memory_bytes=KV_BYTES * 3 // 2, pcie_gbps=1000.0))
    assert answer.chosen is not None
    assert not answer.chosen.swapping
    assert "2 would be in flight" in objections(answer)


def test_a_wish_about_swapping_is_kept() -> None:
    tight = asked(num_machines=8, memory_bytes=KV_BYTES // 2, pcie_gbps=1000.0)
    assert plan(replace(tight, swapping="off")).chosen is None
    chosen = plan(replace(asked(num_machines=2, pcie_gbps=1000.0), swapping="on")).chosen
    assert chosen is not None
    assert chosen.swapping


def test_no_swapped_microbatch_has_more_rows_than_the_most() -> None:
    tight = asked(num_machines=8, memory_bytes=KV_BYTES * 3 // 4, pcie_gbps=1000.0)
    for most in (4, 7):
        chosen = plan(replace(tight, most_rows=most)).chosen
        assert chosen is not None
        assert (chosen.swapping, chosen.rows) == (True, 4)
    chosen = plan(replace(tight, most_rows=8)).chosen
    assert chosen is not None
    assert chosen.rows == 8


def test_the_hosts_memory_limits_what_is_swapped() -> None:
    tight = asked(num_machines=8, memory_bytes=KV_BYTES // 2, pcie_gbps=1000.0)
    small = replace(tight, machines=replace(tight.machines, host_memory_bytes=KV_BYTES - 1))
    answer = plan(small)
    assert answer.chosen is None
    assert "cluster.host_memory_gb" in answer.reason


def test_swapping_makes_room_where_the_kv_of_all_microbatches_does_not_fit() -> None:
    answer = plan(asked(num_machines=8, memory_bytes=KV_BYTES // 2, pcie_gbps=1000.0))
    assert answer.chosen is not None
    assert answer.chosen.swapping
    assert plan(asked(num_machines=8, memory_bytes=KV_BYTES // 2)).chosen is None


def test_a_link_that_is_slower_than_the_prompts_becomes_the_streaming_overhead() -> None:
    a_second_of_link = 8 * 4 * 100 * 24 * 8 / 1e9
    inputs = plan(asked(link_gbps=a_second_of_link / 1.5, overhead=None)).formulas.inputs
    assert inputs.streaming_overhead == pytest.approx(1.5)
    assert plan(asked(link_gbps=1e6, overhead=None)).formulas.inputs.streaming_overhead == 1
    assert plan(asked(overhead=None)).formulas.inputs.streaming_overhead == 1


def test_a_declared_overhead_that_the_link_contradicts_is_kept_and_warned_of() -> None:
    answer = plan(asked(new_tokens=50, link_gbps=1e-6))
    assert answer.formulas.inputs.streaming_overhead == 1
    assert answer.chosen is not None
    assert answer.chosen.mode == "disaggregated"
    assert "over a link" in " ".join(warnings(answer))


def test_the_memory_table_covers_every_layer_once_a_pipeline_and_adds_up() -> None:
    question = asked(num_machines=5, prompt_s=4.0, memory_bytes=10**9)
    answer = plan(question)
    assert answer.chosen is not None
    assert answer.chosen.mode == "disaggregated"
    table = memory_table(question, answer.chosen)
    for kind, depth in (("prompt", answer.chosen.prompt_depth), ("token", answer.chosen.token_depth)):
        stages = [stage for stage in table if stage.pipeline == kind]
        assert [layer for stage in stages for layer in stage.layers.indices] == list(range(24))
        assert len(stages) == depth
        assert sum(stage.weight_bytes for stage in stages) == 24 * LAYER_BYTES + 2 * (20 + 22)
    prompts = [stage for stage in table if stage.pipeline == "prompt"]
    assert sum(stage.kv_bytes for stage in prompts) == KV_BYTES
    assert all(stage.fits for stage in table)


def test_a_stage_that_whole_layers_make_too_big_is_refused_as_a_cluster_would() -> None:
    for_formulas = KV_BYTES + 24 * LAYER_BYTES
    answer = plan(asked(num_machines=1, memory_bytes=for_formulas))
    assert answer.formulas.min_token_depth == 1
    assert answer.chosen is None
    assert "colocated stage 0 (layers [0, 24)) needs" in answer.reason
    assert plan(asked(num_machines=1, memory_bytes=for_formulas + 84)).chosen is not None


def test_whole_microbatches_that_wait_for_their_prompts_need_room_too() -> None:
    question = asked(num_machines=4, prompt_s=2.417, token_s=0.0568, new_tokens=60, memory_bytes=140_000)
    by_row = plan(question).chosen
    whole = plan(replace(question, scheduling="microbatch"))
    assert by_row is not None
    assert (by_row.mode, by_row.in_flight) == ("disaggregated", 2)
    assert whole.chosen is not None
    assert whole.chosen.mode == "colocated"
    assert "token stage" in objections(whole)


def test_cost_is_that_of_all_machines_for_the_time_of_a_request() -> None:
    question = asked(num_machines=2, prompt_s=1.0, token_s=0.0, new_tokens=10, rows=1, price=36.0)
    answer = plan(question)
    assert answer.chosen is not None
    candidate = replace(answer.chosen, mode="colocated", prompt_depth=2, token_depth=2, rows=1, round_s=3.0)
    prediction = predict(candidate, question.lengths, question.machines)
    assert prediction.cost_per_hour == 72
    assert prediction.requests_per_s == pytest.approx(1 / 1.5)
    assert prediction.cost_per_1000_requests == pytest.approx(72 / 3600 * 1.5 * 1000)
    assert prediction.cost_per_million_tokens == pytest.approx(72 / 3600 * 1.5 * 1e6 / 10)


def test_no_machine_stays_idle_so_that_rows_which_all_of_them_hold_can_be_swapped() -> None:
    """Eight rows fit eight machines as they are; on seven they had to be swapped, and that was chosen."""
    answer = plan(asked(num_machines=8, overhead=3.0, memory_bytes=310_500, pcie_gbps=1000.0))
    assert answer.chosen is not None
    assert (answer.chosen.num_machines, answer.chosen.swapping) == (8, False)
