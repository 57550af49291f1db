"""Which cells a slot brings in, takes out, and may not touch."""

from __future__ import annotations

import pytest

from dejavu.errors import InvalidTransition
from dejavu.ids import RowId
from dejavu.kv.slot_cells import SlotCopy, SlotRow
from dejavu.kv.slots import Slots


def row(number: int, length: int, row_index: int = 0) -> SlotRow:
    return SlotRow(row_id=RowId(number), row_index=row_index, length=length)


def copy(slots: Slots) -> SlotCopy:
    made = slots.next_copy()
    assert made is not None
    slots.done(made)
    return made


def step(
    slots: Slots, microbatch: int, *rows: SlotRow, then: tuple[int, SlotRow] | None = None
) -> list[tuple[str, int, int]]:
    """The rows' step, and meanwhile every copy; what was copied for it: way, microbatch, cells."""
    slots.need(microbatch, rows)
    copies = []
    while not slots.is_ready(microbatch, rows):
        copies.append(copy(slots))
    slots.begin_step(microbatch, rows)
    if then is not None:
        slots.expect(then[0], [then[1]])
        while (made := slots.next_copy()) is not None:
            slots.done(made)
            copies.append(made)
    slots.end_step(microbatch, rows)
    return [(one.way, one.microbatch, one.num_cells) for one in copies]


def test_a_first_step_brings_in_all_valid_cells_and_takes_out_the_new_one() -> None:
    slots = Slots()
    assert step(slots, 0, row(1, 7), row(2, 3, row_index=1)) == [("in", 0, 10)]
    out = copy(slots)
    assert (out.way, [(span.start, span.stop) for span in out.spans]) == ("out", [(7, 8), (3, 4)])
    assert slots.is_out


def test_a_microbatch_that_still_has_its_slot_brings_in_nothing() -> None:
    slots = Slots()
    step(slots, 0, row(1, 7))
    step(slots, 1, row(2, 4))
    assert [one for one in step(slots, 0, row(1, 8)) if one[0] == "in"] == []
    assert [one for one in step(slots, 1, row(2, 5)) if one[0] == "in"] == []


def test_with_three_microbatches_each_step_brings_in_the_whole_next_one_and_takes_out_the_new_cell() -> None:
    slots = Slots()
    step(slots, 0, row(0, 7), then=(1, row(1, 7)))
    step(slots, 1, row(1, 7), then=(2, row(2, 7)))
    for turn in range(6):
        here, following = (turn + 2) % 3, (turn + 3) % 3
        length = 7 + (turn + 2) // 3
        then = (following, row(following, 7 + (turn + 3) // 3))
        copies = step(slots, here, row(here, length), then=then)
        assert copies == [("out", (turn + 1) % 3, 1), ("in", following, then[1].length)]


def test_a_row_that_took_another_ones_place_comes_in_whole() -> None:
    slots = Slots()
    step(slots, 0, row(1, 7), row(2, 4, row_index=1))
    slots.forget(0, [0])
    assert [one for one in step(slots, 0, row(3, 5), row(2, 5, row_index=1)) if one[0] == "in"] == [("in", 0, 5)]


def test_a_slot_whose_new_cells_are_not_out_is_not_given_away() -> None:
    slots = Slots()
    step(slots, 0, row(1, 7), then=(1, row(2, 7)))
    step(slots, 1, row(2, 7))
    out = [slots.next_copy(), slots.next_copy()]
    slots.need(2, [row(3, 7)])
    assert slots.next_copy() is None
    assert [slots.state(0), slots.state(1)] == ["going out", "going out"]
    assert out[1] is not None
    slots.done(out[1])
    brought = slots.next_copy()
    assert brought is not None
    assert (brought.slot, slots.owner(0)) == (1, 0)


def test_a_wrong_expectation_costs_cells_and_they_are_counted() -> None:
    slots = Slots()
    step(slots, 0, row(1, 7), then=(1, row(2, 5)))
    assert step(slots, 2, row(3, 4), then=(3, row(4, 6))) == [("out", 0, 1), ("in", 2, 4), ("in", 3, 6)]
    assert (slots.owner(0), slots.owner(1)) == (2, 3)
    assert slots.unused_cells == 5


def test_a_row_that_ends_while_it_comes_in_counts_as_brought_for_nothing() -> None:
    slots = Slots()
    slots.expect(1, [row(2, 5)])
    coming = slots.next_copy()
    assert coming is not None
    slots.forget(1, [0])
    assert slots.is_copying(1, frozenset([0]))
    slots.done(coming)
    assert slots.unused_cells == 5
    assert slots.next_copy() is None


def test_a_step_whose_cells_are_not_in_is_refused_with_the_slots_state() -> None:
    slots = Slots()
    slots.need(0, [row(1, 7)])
    slots.next_copy()
    with pytest.raises(InvalidTransition, match=r"slot 0 coming in \(microbatch 0, rows 0: row 1 \[0, 0\)"):
        slots.begin_step(0, [row(1, 7)])


def test_slots_cannot_be_cleared_while_a_cell_is_there_alone() -> None:
    slots = Slots()
    step(slots, 0, row(1, 7))
    with pytest.raises(InvalidTransition, match="does not have every cell"):
        slots.clear()
    copy(slots)
    slots.clear()
    assert [slots.state(0), slots.owner(0)] == ["empty", None]
