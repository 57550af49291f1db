"""Which request gets which row, and which rows share a prompt microbatch."""

from __future__ import annotations

import msgspec
import pytest

from dejavu.control.admission import Admission, Assigned
from dejavu.control.plan import Plan, Scheduling
from dejavu.errors import InvalidTransition
from dejavu.ids import RequestId, RowId
from dejavu.request import Request

from harness.plans import split_plan


def request(name: str, length: int = 3) -> Request:
    return Request(id=RequestId(name), prompt_tokens=(1,) * length, max_tokens=4)


def admission(
    *names: str,
    scheduling: Scheduling = "row",
    num_microbatches: int = 2,
    microbatch_rows: int = 2,
    prompt_rows: int = 2,
    most_prompts: int = 9,
) -> Admission:
    made = Admission(
        num_microbatches=num_microbatches,
        microbatch_rows=microbatch_rows,
        prompt_rows=prompt_rows,
        most_prompts=most_prompts,
        scheduling=scheduling,
    )
    for name in names:
        made.enqueue(request(name))
    return made


def names(rows: tuple[Assigned, ...]) -> list[str]:
    return [row.request.id for row in rows]


def ids(rows: tuple[Assigned, ...]) -> list[RowId]:
    return [row.row_id for row in rows]


def places(rows: tuple[Assigned, ...]) -> list[tuple[int, int]]:
    return [(row.slot.microbatch, row.slot.row_index) for row in rows]


def test_no_prompt_is_run_without_a_request() -> None:
    assert admission().next_prompt() == ()


def test_rows_are_spread_over_the_emptiest_microbatches() -> None:
    made = admission("a", "b", "c", "d", prompt_rows=4)
    assert places(made.next_prompt()) == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_requests_wait_while_every_row_is_taken() -> None:
    made = admission("a", "b", "c", num_microbatches=1)
    first = made.next_prompt()
    assert names(first) == ["a", "b"]
    assert made.next_prompt() == ()
    assert (made.num_waiting, made.num_rows_taken) == (1, 2)
    made.free(first[1].row_id)
    again = made.next_prompt()
    assert (names(again), places(again)) == (["c"], [(0, 1)])


def test_a_row_id_is_never_given_twice() -> None:
    made = admission("a", "b", num_microbatches=1, microbatch_rows=1)
    first = made.next_prompt()
    made.free(first[0].row_id)
    assert made.next_prompt()[0].row_id != first[0].row_id


def test_prompts_under_way_are_bounded() -> None:
    made = admission("a", "b", prompt_rows=1, most_prompts=1)
    first = made.next_prompt()
    assert made.next_prompt() == ()
    made.prompt_done(ids(first), ())
    assert names(made.next_prompt()) == ["b"]


def test_prompts_of_like_length_share_a_microbatch_and_the_head_is_never_passed_over() -> None:
    made = admission()
    for name, length in (("long", 40), ("short", 2), ("longish", 38), ("tiny", 1)):
        made.enqueue(request(name, length))
    assert names(made.next_prompt()) == ["long", "longish"]
    assert names(made.next_prompt()) == ["short", "tiny"]


def test_row_scheduling_admits_each_continuing_row_alone() -> None:
    made = admission("a", "b")
    rows = made.next_prompt()
    assert made.prompt_done(ids(rows), [rows[1].row_id]) == ((rows[1],),)


def test_microbatch_scheduling_admits_the_group_once_all_its_prompts_are_done() -> None:
    made = admission("a", "b", "c", scheduling="microbatch", microbatch_rows=3, num_microbatches=1)
    first, second = made.next_prompt(), made.next_prompt()
    assert (names(first), names(second)) == (["a", "b"], ["c"])
    assert made.prompt_done(ids(first), [first[0].row_id]) == ()
    assert made.prompt_done(ids(second), ids(second)) == ((first[0], second[0]),)


def test_microbatch_scheduling_refills_only_a_microbatch_that_is_wholly_free() -> None:
    made = admission("a", "b", "c", scheduling="microbatch", num_microbatches=1)
    rows = made.next_prompt()
    made.prompt_done(ids(rows), ids(rows))
    made.free(rows[0].row_id)
    assert made.next_prompt() == ()
    made.free(rows[1].row_id)
    assert names(made.next_prompt()) == ["c"]


def test_a_group_whose_rows_all_ended_at_once_admits_nothing_and_is_over() -> None:
    made = admission("a", "b", "c", scheduling="microbatch", num_microbatches=1)
    rows = made.next_prompt()
    assert made.prompt_done(ids(rows), ()) == ()
    for row_id in ids(rows):
        made.free(row_id)
    assert names(made.next_prompt()) == ["c"]


def test_a_withdrawn_row_is_not_admitted_with_its_group() -> None:
    made = admission("a", "b", scheduling="microbatch", prompt_rows=1)
    first, second = made.next_prompt(), made.next_prompt()
    made.prompt_done(ids(first), ids(first))
    made.withdraw(first[0].row_id)
    assert made.prompt_done(ids(second), ids(second)) == ((second[0],),)


def test_a_row_given_back_before_its_prompt_is_done_does_not_hold_up_its_group() -> None:
    """A row may fail, and be given back, before the word of its first token comes."""
    made = admission("a", "b", scheduling="microbatch")
    rows = made.next_prompt()
    made.requeue(rows[0].row_id)
    made.free(rows[0].row_id)
    assert made.prompt_done(ids(rows), [rows[1].row_id]) == ((rows[1],),)


def test_a_requeued_request_is_first_in_line_and_its_row_stays_taken() -> None:
    made = admission("a", "b", "c", num_microbatches=1)
    rows = made.next_prompt()
    assert made.requeue(rows[1].row_id).id == "b"
    assert made.num_rows_taken == 2
    made.free(rows[1].row_id)
    assert names(made.next_prompt()) == ["b"]


def test_a_row_given_back_twice_is_refused() -> None:
    made = admission("a")
    row_id = made.next_prompt()[0].row_id
    made.free(row_id)
    assert made.assigned(row_id) is None
    with pytest.raises(InvalidTransition, match="not taken"):
        made.free(row_id)


def test_the_plans_admission_has_the_token_pipelines_rows() -> None:
    made = Admission.of(split_plan(2, 3, prompt_rows=4, token_rows=2))
    for index in range(20):
        made.enqueue(request(f"r{index}"))
    taken = 0
    while rows := made.next_prompt():
        taken += len(rows)
        made.prompt_done(ids(rows), ())
    assert taken == 3 * 2


def test_a_prompt_microbatch_takes_no_more_tokens_than_its_limit_padding_included() -> None:
    made = Admission(
        num_microbatches=1,
        microbatch_rows=8,
        prompt_rows=4,
        most_prompts=9,
        scheduling="row",
        prompt_tokens=20,
    )
    for number, length in enumerate((10, 9, 8, 50, 3, 3)):
        made.enqueue(Request(id=RequestId(f"q{number}"), prompt_tokens=(1,) * length, max_tokens=1))
    sizes = []
    while rows := made.next_prompt():
        sizes.append([len(row.request.prompt_tokens) for row in rows])
    assert sorted(length for batch in sizes for length in batch) == [3, 3, 8, 9, 10, 50]
    assert all(len(batch) == 1 or len(batch) * max(batch) <= 20 for batch in sizes)
    assert [10, 9] in sizes


def test_long_prompts_and_short_ones_take_turns() -> None:
    """Field report B38: a queue of long prompts must not keep the short ones behind it waiting."""
    made = Admission(
        num_microbatches=2,
        microbatch_rows=8,
        prompt_rows=4,
        prompt_tokens=20,
        most_prompts=9,
        scheduling="row",
    )
    for number in range(3):
        made.enqueue(request(f"long{number}", 40))
    for number in range(8):
        made.enqueue(request(f"short{number}", 2))
    turns = []
    while rows := made.next_prompt():
        turns.append(names(rows))
    assert turns == [
        ["long0"],
        ["short0", "short1", "short2", "short3"],
        ["long1"],
        ["short4", "short5", "short6", "short7"],
        ["long2"],
    ]


def test_a_short_prompt_behind_any_number_of_long_ones_waits_for_one_of_them() -> None:
    """It was looked for among the first 32 that waited."""
    made = Admission(
        num_microbatches=2,
        microbatch_rows=8,
        prompt_rows=4,
        prompt_tokens=20,
        most_prompts=9,
        scheduling="row",
    )
    for number in range(40):
        made.enqueue(request(f"long{number}", 40))
    for number in range(6):
        made.enqueue(request(f"short{number}", 2))
    assert [names(made.next_prompt()) for _ in range(4)] == [
        ["long0"],
        ["short0", "short1", "short2", "short3"],
        ["long1"],
        ["short4", "short5"],
    ]


def test_long_prompts_follow_each_other_when_no_short_one_waits() -> None:
    made = Admission(
        num_microbatches=1,
        microbatch_rows=8,
        prompt_rows=4,
        prompt_tokens=20,
        most_prompts=9,
        scheduling="row",
    )
    for number in range(3):
        made.enqueue(request(f"long{number}", 40))
    assert [names(made.next_prompt()) for _ in range(3)] == [["long0"], ["long1"], ["long2"]]


def test_a_request_that_waits_is_cancelled_without_a_row() -> None:
    made = admission("a", "b", "c")
    assert made.cancel(RequestId("b")) is None
    assert names(made.next_prompt()) == ["a", "c"]


def test_a_request_whose_prompt_is_due_is_cancelled_with_its_row_and_its_group_goes_on() -> None:
    made = admission("a", "b", scheduling="microbatch", prompt_rows=1)
    first = made.next_prompt()
    row_id = made.cancel(RequestId("b"))
    assert row_id is not None
    assert made.prompt_done(ids(first), ids(first)) == ()
    (group,) = made.prompt_done([row_id], ())
    assert names(group) == ["a"]
    made.free(row_id)
    assert made.num_rows_taken == 1


def reshaped_plan(in_flight: int, rows: int) -> Plan:
    plan = split_plan(1, 2, prompt_rows=2, token_rows=rows)
    pipelines = tuple(msgspec.structs.replace(one, in_flight=in_flight) for one in plan.pipelines)
    return msgspec.structs.replace(plan, pipelines=pipelines)


def test_a_smaller_shape_keeps_the_eldest_rows_and_the_others_wait_before_all_with_their_tokens_known() -> None:
    made = admission("a", "b", "c", "d", "waiting", prompt_rows=2)
    sent = (*made.next_prompt(), *made.next_prompt())
    made.prompt_done(ids(sent[:2]), ids(sent[:2]))
    given_up = made.reshape(reshaped_plan(1, 2), {row.row_id: 5 for row in sent})
    assert given_up == tuple(ids(sent[2:]))
    assert made.taken == tuple(ids(sent[:2]))
    assert {made.assigned(row_id).slot.microbatch for row_id in made.taken if made.assigned(row_id)} == {0}  # type: ignore[union-attr]
    made.interrupt({}, [])
    assert made.next_prompt() == ()
    for row_id in made.taken:
        made.free(row_id)
    again = made.next_prompt()
    assert (names(again), [row.num_known for row in again]) == (["c", "d"], [5, 5])
    assert not set(ids(again)) & set(given_up)


def test_rows_that_were_never_sent_or_have_ended_have_no_place_in_a_new_shape() -> None:
    made = admission("a", "b", "c", prompt_rows=1)
    first, second = made.next_prompt(), made.next_prompt()
    made.interrupt({second[0].row_id: 3}, [])
    assert made.reshape(reshaped_plan(3, 1), {second[0].row_id: 3}) == (second[0].row_id,)
    assert first[0].row_id not in made.taken
    rows = made.next_prompt()
    assert [(row.request.id, row.num_known) for row in rows] == [("b", 3), ("c", 0)]


def test_the_same_shape_leaves_every_row_where_it_is() -> None:
    made = admission("a", "b", prompt_rows=2)
    rows = made.next_prompt()
    assert made.reshape(reshaped_plan(2, 2), {row.row_id: 1 for row in rows}) == ()
    assert [made.assigned(row.row_id) for row in rows] == list(rows)
