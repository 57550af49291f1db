"""The planner over arbitrary machines, models and times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dejavu.planning.question import Question
from dejavu.planning.search import plan

from harness.planning_by_hand import ways
from harness.planning_kit import asked

TIMES = st.one_of(st.just(0.0), st.floats(1e-6, 1e3, allow_nan=False))


@st.composite
def questions(draw: st.DrawFn) -> Question:
    return asked(
        num_machines=draw(st.integers(1, 8)),
        prompt_s=draw(TIMES),
        token_s=draw(TIMES),
        new_tokens=draw(st.integers(0, 300)),
        memory_bytes=draw(st.one_of(st.none(), st.integers(1, 400_000))),
        overhead=draw(st.one_of(st.none(), st.floats(1, 2.5))),
        rows=draw(st.integers(1, 8)),
        num_layers=draw(st.integers(1, 30)),
        pcie_gbps=draw(st.one_of(st.none(), st.floats(1e-6, 1e3))),
        link_gbps=draw(st.one_of(st.none(), st.floats(1e-6, 1e3))),
    )


def more(question: Question) -> Question:
    machines = replace(question.machines, count=question.machines.count + 1)
    return replace(question, machines=machines)


@given(questions())
def test_nothing_that_can_be_done_by_hand_is_faster_than_the_chosen_one(question: Question) -> None:
    chosen, by_hand = plan(question).chosen, [way.row_s for way in ways(question)]
    assert (chosen is None) == (not by_hand)
    if chosen is not None:
        assert chosen.row_s == pytest.approx(min(by_hand))


@given(questions())
def test_a_split_is_chosen_only_where_the_papers_condition_allows_one(question: Question) -> None:
    # With fewer layers than machines, one pipeline leaves machines idle that a split can use.
    assume(question.machines.count <= question.shape.num_layers)
    answer = plan(question)
    if answer.chosen is not None and answer.chosen.mode == "disaggregated" and not answer.chosen.swapping:
        assert answer.formulas.may_pay


@given(questions())
def test_one_more_machine_never_worsens_the_best_plan(question: Question) -> None:
    before, after = plan(question).chosen, plan(more(question)).chosen
    if before is not None:
        assert after is not None
        assert after.row_s <= before.row_s * (1 + 1e-9)
