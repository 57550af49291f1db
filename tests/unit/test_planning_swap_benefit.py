"""Where swapping stops paying, by the rule and between measured lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dejavu.planning.costs import GivenCosts
from dejavu.planning.swap_benefit import SwapQuestion, slower_from

QUESTION = SwapQuestion(
    costs=GivenCosts(rows=4, whole_prompt_time_s=1.0, whole_token_time_s=0.1),
    depth=4,
    rows=4,
    prompt_tokens=100,
    kv_bytes_per_token=10,
    pcie_bytes_per_s=100_000.0,
)
"""A step's transfer takes as long as the step at 250 tokens a row."""


def test_where_transfers_hide_under_steps_the_promise_is_nearly_twice_the_throughput() -> None:
    without, swapped = replace(QUESTION, pcie_bytes_per_s=1e9).promised(1100)
    assert without == pytest.approx(2 * 4 * 4 * 1000 / (2 * 1.0 + 2 * 1000 * 0.1))
    assert swapped == pytest.approx(2 * 4 * 4 * 1000 / (2 * 1.0 + 1001 * 0.1))


def test_the_rule_pays_up_to_a_length_and_not_beyond_it() -> None:
    longest = QUESTION.longest_paying(5000)
    assert longest is not None
    assert QUESTION.rule(longest).pays
    assert not any(QUESTION.rule(length).pays for length in range(longest + 1, 5001))
    assert QUESTION.longest_paying(longest - 50) == longest - 50
    assert replace(QUESTION, pcie_bytes_per_s=1.0).longest_paying(5000) is None


def test_moving_the_kv_of_all_rows_stops_it_sooner() -> None:
    by_letter, moved = QUESTION.longest_paying(5000), replace(QUESTION, moved_rows=8).longest_paying(5000)
    assert by_letter is not None
    assert moved is not None
    assert moved < 0.6 * by_letter


@pytest.mark.parametrize(
    ("gains", "stop"),
    [([1.8, 1.2, 0.8], 300), ([1.8, 1.2, 1.1], None), ([0.9, 0.8, 0.7], 100), ([1.2, 0.9, 1.1], None), ([], None)],
)
def test_swapping_stops_to_gain_between_the_lengths_around_it_or_before_all_of_them(
    gains: list[float], stop: float | None
) -> None:
    assert slower_from([100, 200, 400][: len(gains)], gains) == (stop if stop is None else pytest.approx(stop))
