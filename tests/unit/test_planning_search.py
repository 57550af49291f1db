"""The choice among candidates: as good as trying everything, and never an error instead of a no."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from dejavu.planning.document import document, warnings
from dejavu.planning.memory import memory_table
from dejavu.planning.prediction import predict
from dejavu.planning.search import Answer, plan

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


def rounds(answer: Answer) -> dict[tuple[int, int], float]:
    """By hand: every split's seconds per round, by its depths, that memory allows; (0, 0) is one pipeline."""
    inputs = answer.formulas.inputs
    machines, prompt_s, token_s = inputs.num_machines, inputs.prompt_time_s, inputs.token_time_s
    new_tokens, overhead = inputs.num_new_tokens, inputs.streaming_overhead
    least_prompt, least_token = answer.formulas.min_prompt_depth, answer.formulas.min_token_depth
    found = {}
    if least_token is not None and machines >= least_token:
        bubble = (machines - 1) * (prompt_s - token_s) / machines
        found[(0, 0)] = max(bubble, 0) + prompt_s + new_tokens * token_s
    for prompt in range(1, machines):
        token = machines - prompt
        if prompt >= least_prompt and least_token is not None and token >= least_token:
            found[(prompt, token)] = max(
                machines * overhead * prompt_s / prompt, machines * new_tokens * token_s / token
            )
    return found


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
def test_b32_the_whole_grid_is_answered_with_numbers_and_as_well_as_by_trying_everything(machines: int) -> None:
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
        by_hand = rounds(answer)
        if answer.chosen is None:
            assert by_hand == {}
            assert answer.reason.startswith("infeasible because")
            assert any(letter.isdigit() for letter in answer.reason)
            assert len(answer.reason.splitlines()) <= 3
            continue
        assert answer.chosen.round_s == pytest.approx(min(by_hand.values()))
        if answer.chosen.mode == "disaggregated":
            assert answer.reason.startswith("disaggregate:")
            assert answer.formulas.may_pay
            assert answer.chosen.prompt_depth >= 1
            assert answer.chosen.token_depth >= 1
            assert answer.chosen.num_machines == count
        else:
            assert answer.reason.startswith("do not disaggregate")


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


def test_swapping_is_considered_only_where_the_bandwidth_to_the_host_is_known() -> None:
    assert plan(asked()).swap is None
    answer = plan(asked(pcie_gbps=1000.0))
    assert answer.swap is not None
    assert answer.swap.pays
    assert answer.chosen is not None
    assert answer.chosen.swapping
    assert answer.chosen.rows == 8
    slow = plan(asked(pcie_gbps=1e-6))
    assert slow.swap is not None
    assert not slow.swap.pays
    assert slow.chosen is not None
    assert not slow.chosen.swapping


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
    assert sum(stage.kv_bytes for stage in prompts) == KV_BYTES // 2
    assert all(stage.fits for stage in table)


def test_a_stage_that_only_the_whole_layers_make_too_big_is_warned_of() -> None:
    answer = plan(asked(num_machines=1, memory_bytes=KV_BYTES + 24 * LAYER_BYTES))
    assert answer.chosen is not None
    assert "embedding and head" in " ".join(warnings(answer))


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
