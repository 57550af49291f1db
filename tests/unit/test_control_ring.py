"""Token stage 0's microbatches: when rows join, step and leave."""

from __future__ import annotations

import pytest

from dejavu.control.ending import Limits
from dejavu.control.ring import AdmittedRow, Ring, Step
from dejavu.errors import InvalidTransition
from dejavu.ids import RowId
from dejavu.request import Sampling

A, B, C = RowId(1), RowId(2), RowId(3)


def admitted(row_id: RowId, *, microbatch: int = 0, row_index: int = 0, max_tokens: int = 10) -> AdmittedRow:
    return AdmittedRow(
        row_id=row_id,
        microbatch=microbatch,
        row_index=row_index,
        position=5,
        token=70,
        num_generated=1,
        limits=Limits(max_tokens=max_tokens, eos_token_ids=(9,)),
    )


def stepped(ring: Ring) -> Step:
    step = ring.next_step()
    assert step is not None
    return step


def test_a_row_steps_only_once_it_is_ready_on_every_stage() -> None:
    ring = Ring(num_microbatches=1, num_ready_stages=2)
    ring.admit([admitted(A)], 0.0)
    ring.row_ready(A, 1)
    ring.row_ready(A, 1)
    assert ring.next_step() is None
    assert ring.num_pending == 1
    ring.row_ready(A, 0)
    step = stepped(ring)
    assert [(row.row_id, row.position, row.token, row.sampling) for row in step.rows] == [(A, 5, 70, None)]
    assert (ring.num_live, ring.num_pending) == (1, 0)


def test_readiness_that_came_before_the_admission_counts() -> None:
    ring = Ring(num_microbatches=1, num_ready_stages=1)
    ring.row_ready(A, 0)
    ring.admit([admitted(A)], 0.0)
    assert stepped(ring).rows[0].row_id == A


def test_rows_admitted_together_join_together() -> None:
    ring = Ring(num_microbatches=1, num_ready_stages=1)
    ring.admit([admitted(A), admitted(B, row_index=1)], 0.0)
    ring.row_ready(A, 0)
    assert ring.next_step() is None
    ring.row_ready(B, 0)
    assert len(stepped(ring).rows) == 2


def test_a_microbatch_has_one_step_under_way_and_others_go_on() -> None:
    ring = Ring(num_microbatches=2, num_ready_stages=0)
    ring.admit([admitted(A), admitted(B, microbatch=1)], 0.0)
    assert {stepped(ring).microbatch, stepped(ring).microbatch} == {0, 1}
    assert ring.next_step() is None


def test_microbatches_step_in_turn() -> None:
    ring = Ring(num_microbatches=2, num_ready_stages=0)
    ring.admit([admitted(A), admitted(B, microbatch=1)], 0.0)
    order = []
    for _ in range(4):
        step = stepped(ring)
        order.append(step.microbatch)
        ring.complete(step.microbatch, step.step, {row.row_id: 1 for row in step.rows})
    assert order == [0, 1, 0, 1]


def test_a_row_moves_on_by_one_with_each_token() -> None:
    ring = Ring(num_microbatches=1, num_ready_stages=0)
    ring.admit([admitted(A)], 0.0)
    assert ring.complete(0, stepped(ring).step, {A: 33}) == ()
    row = stepped(ring).rows[0]
    assert (row.position, row.token) == (6, 33)


@pytest.mark.parametrize(("token", "max_tokens"), [(9, 10), (8, 2)], ids=["eos", "limit"])
def test_a_row_that_ends_is_returned_and_gone(token: int, max_tokens: int) -> None:
    ring = Ring(num_microbatches=1, num_ready_stages=0)
    ring.admit([admitted(A, max_tokens=max_tokens)], 0.0)
    assert ring.complete(0, stepped(ring).step, {A: token}) == (A,)
    assert ring.num_live == 0
    assert ring.next_step() is None


def test_a_row_released_at_rest_is_gone_at_once() -> None:
    ring = Ring(num_microbatches=1, num_ready_stages=0)
    ring.admit([admitted(A)], 0.0)
    assert ring.release([A]) == (A,)
    assert ring.next_step() is None


def test_a_row_released_under_way_is_gone_when_its_step_is_back() -> None:
    ring = Ring(num_microbatches=1, num_ready_stages=0)
    ring.admit([admitted(A), admitted(B, row_index=1)], 0.0)
    step = stepped(ring)
    assert ring.release([A]) == ()
    assert ring.complete(0, step.step, {A: 1, B: 1}) == (A,)
    assert [row.row_id for row in stepped(ring).rows] == [B]


def test_a_row_released_before_its_admission_never_joins() -> None:
    ring = Ring(num_microbatches=1, num_ready_stages=0)
    assert ring.release([A]) == (A,)
    ring.admit([admitted(A)], 0.0)
    ring.row_ready(A, 0)
    assert (ring.num_live, ring.num_pending) == (0, 0)


def test_a_released_row_lets_the_rest_of_its_group_join() -> None:
    ring = Ring(num_microbatches=1, num_ready_stages=1)
    ring.admit([admitted(A), admitted(B, row_index=1)], 0.0)
    ring.row_ready(B, 0)
    assert ring.release([A]) == (A,)
    assert [row.row_id for row in stepped(ring).rows] == [B]


def test_a_row_that_joins_meanwhile_waits_for_the_step_under_way() -> None:
    ring = Ring(num_microbatches=1, num_ready_stages=0)
    ring.admit([admitted(A, row_index=1)], 0.0)
    step = stepped(ring)
    ring.admit([admitted(B)], 0.0)
    assert (ring.num_live, ring.num_pending) == (1, 1)
    ring.complete(0, step.step, {A: 1})
    assert [row.row_id for row in stepped(ring).rows] == [B, A]


def test_a_row_released_while_it_waits_to_join_is_gone_at_once() -> None:
    ring = Ring(num_microbatches=1, num_ready_stages=0)
    ring.admit([admitted(A, row_index=1)], 0.0)
    step = stepped(ring)
    ring.admit([admitted(B)], 0.0)
    assert ring.release([B]) == (B,)
    ring.complete(0, step.step, {A: 1})
    assert [row.row_id for row in stepped(ring).rows] == [A]


def test_only_rows_that_miss_a_stage_are_overdue() -> None:
    ring = Ring(num_microbatches=1, num_ready_stages=2)
    ring.admit([admitted(A), admitted(B, row_index=1)], 1.0)
    ring.admit([admitted(C)], 5.0)
    for stage in (0, 1):
        ring.row_ready(A, stage)
    assert ring.overdue(1.0) == ()
    assert ring.overdue(4.0) == (B,)
    assert ring.overdue(6.0) == (B, C)


def test_a_sampled_row_takes_its_sampling_along() -> None:
    ring = Ring(num_microbatches=1, num_ready_stages=0)
    sampling = Sampling(temperature=0.5, seed=3)
    row = AdmittedRow(
        row_id=A,
        microbatch=0,
        row_index=0,
        position=1,
        token=1,
        num_generated=1,
        limits=Limits(max_tokens=2),
        sampling=sampling,
    )
    ring.admit([row], 0.0)
    assert stepped(ring).rows[0].sampling == sampling


@pytest.mark.parametrize(("step", "tokens"), [(2, {A: 1}), (1, {})], ids=["another step", "no token"])
def test_tokens_that_do_not_fit_the_step_under_way_are_refused(step: int, tokens: dict[RowId, int]) -> None:
    ring = Ring(num_microbatches=1, num_ready_stages=0)
    ring.admit([admitted(A)], 0.0)
    stepped(ring)
    with pytest.raises(InvalidTransition, match=r"step \d of|microbatch 0"):
        ring.complete(0, step, tokens)


def test_tokens_of_an_idle_microbatch_are_refused() -> None:
    ring = Ring(num_microbatches=1, num_ready_stages=0)
    with pytest.raises(InvalidTransition, match="idle"):
        ring.complete(0, 1, {})


def test_an_admission_to_a_microbatch_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidTransition, match="microbatch 1"):
        Ring(num_microbatches=1, num_ready_stages=0).admit([admitted(A, microbatch=1)], 0.0)
