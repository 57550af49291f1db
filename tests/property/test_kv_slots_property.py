"""Slots under any order of steps, arrivals, ends and copies: a step finds every cell, and none is lost."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dejavu.ids import RowId
from dejavu.kv.slot_cells import SlotCopy, SlotRow
from dejavu.kv.slots import NUM_SLOTS, Slots

MICROBATCHES = 4
ROWS = 3
POISON = ("poison", -1)
LENGTH = 40

Cell = tuple[object, int]


class Swapping(RuleBasedStateMachine):
    """A stage with memory of its own for host and slots: cells are (row, position), and what is out is poisoned."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()
        self.host: dict[tuple[int, int], list[Cell]] = {}
        self.device: list[list[list[Cell]]] = [[[POISON] * LENGTH for _ in range(ROWS)] for _ in range(NUM_SLOTS)]
        self.live: dict[tuple[int, int], tuple[RowId, int]] = {}
        self.copies: list[SlotCopy] = []
        self.owners: list[int | None] = [None] * NUM_SLOTS
        self.needed: int | None = None
        self.computing: tuple[int, int, list[SlotRow]] | None = None
        self.brought = self.used = 0
        self.fresh: dict[tuple[int, int], set[Cell]] = {}
        """By slot and row: cells that came in and no step has read."""
        self.next_row = 0

    def rows_of(self, microbatch: int) -> list[SlotRow]:
        return [
            SlotRow(row_id=row_id, row_index=index, length=length)
            for (owner, index), (row_id, length) in sorted(self.live.items())
            if owner == microbatch
        ]

    @rule(microbatch=st.integers(0, MICROBATCHES - 1), index=st.integers(0, ROWS - 1), length=st.integers(1, 5))
    def a_row_begins_once_nothing_copies_its_place(self, microbatch: int, index: int, length: int) -> None:
        if self.computing is not None and self.computing[0] == microbatch:
            return
        self.slots.forget(microbatch, [index])
        self.live.pop((microbatch, index), None)
        while self.slots.is_copying(microbatch, frozenset([index])):
            self.finish_copy(0)
        row_id = RowId(self.next_row)
        self.next_row += 1
        self.live[microbatch, index] = (row_id, length)
        cells: list[Cell] = [(row_id, position) for position in range(length)]
        self.host[microbatch, index] = cells + [POISON] * (LENGTH - length)

    @rule(microbatch=st.integers(0, MICROBATCHES - 1), index=st.integers(0, ROWS - 1))
    def a_row_ends(self, microbatch: int, index: int) -> None:
        if self.computing is None or self.computing[0] != microbatch:
            self.slots.forget(microbatch, [index])
            self.live.pop((microbatch, index), None)

    @rule(microbatch=st.integers(0, MICROBATCHES - 1))
    def a_microbatch_is_expected(self, microbatch: int) -> None:
        self.slots.expect(microbatch, self.rows_of(microbatch))

    @precondition(lambda self: self.computing is None)
    @rule(microbatch=st.integers(0, MICROBATCHES - 1))
    def a_step_is_due(self, microbatch: int) -> None:
        if self.rows_of(microbatch):
            self.slots.need(microbatch, self.rows_of(microbatch))
            self.needed = microbatch

    @rule()
    def a_copy_begins(self) -> None:
        copy = self.slots.next_copy()
        if copy is None:
            return
        if self.owners[copy.slot] != copy.microbatch:
            self.owners[copy.slot] = copy.microbatch
            self.device[copy.slot] = [[POISON] * LENGTH for _ in range(ROWS)]
        self.copies.append(copy)
        self.brought += copy.num_cells if copy.way == "in" else 0

    @precondition(lambda self: self.copies)
    @rule(which=st.integers(0, 20))
    def a_copy_ends(self, which: int) -> None:
        self.finish_copy(which)

    def finish_copy(self, which: int) -> None:
        copy = self.copies.pop(which % len(self.copies))
        for span in copy.spans:
            device = self.device[copy.slot][span.row_index]
            host = self.host[copy.microbatch, span.row_index]
            source, target = (host, device) if copy.way == "in" else (device, host)
            target[span.start : span.stop] = source[span.start : span.stop]
            if copy.way == "in":
                came = {(span.row_id, position) for position in range(span.start, span.stop)}
                self.fresh.setdefault((copy.slot, span.row_index), set()).update(came)
        self.slots.done(copy)

    @precondition(lambda self: self.computing is None and self.needed is not None)
    @rule()
    def the_step_begins_when_its_slot_is_ready(self) -> None:
        assert self.needed is not None
        rows = self.rows_of(self.needed)
        if not rows or not self.slots.is_ready(self.needed, rows):
            return
        slot = self.slots.begin_step(self.needed, rows)
        assert self.slots.owner(slot) == self.needed
        self.owners[slot] = self.needed
        for row in rows:
            cells = self.device[slot][row.row_index][: row.length]
            assert cells == [(row.row_id, position) for position in range(row.length)]
            self.used += len(self.fresh.pop((slot, row.row_index), set()).intersection(cells))
        self.computing = (self.needed, slot, rows)
        self.needed = None

    @precondition(lambda self: self.computing is not None)
    @rule()
    def the_step_ends(self) -> None:
        assert self.computing is not None
        microbatch, slot, rows = self.computing
        for row in rows:
            self.device[slot][row.row_index][row.length] = (row.row_id, row.length)
            self.live[microbatch, row.row_index] = (row.row_id, row.length + 1)
        self.slots.end_step(microbatch, rows)
        self.computing = None

    @precondition(lambda self: self.computing is None)
    @rule()
    def the_host_store_has_everything_after_a_drain(self) -> None:
        while not self.slots.is_out:
            self.a_copy_begins()
            self.finish_copy(0)
        self.slots.clear()
        self.owners = [None] * NUM_SLOTS
        assert self.brought == self.used + self.slots.unused_cells
        for place, (row_id, length) in self.live.items():
            assert self.host[place][:length] == [(row_id, position) for position in range(length)]

    @precondition(lambda self: self.computing is None and self.needed is not None and self.rows_of(self.needed))
    @rule()
    def what_is_due_gets_ready_once_its_copies_end(self) -> None:
        assert self.needed is not None
        self.slots.need(self.needed, self.rows_of(self.needed))
        for _ in range(20):
            self.a_copy_begins()
            while self.copies:
                self.finish_copy(0)
        assert self.slots.is_ready(self.needed, self.rows_of(self.needed))

    @invariant()
    def no_microbatch_has_two_slots(self) -> None:
        owners = [owner for owner in map(self.slots.owner, range(NUM_SLOTS)) if owner is not None]
        assert len(owners) == len(set(owners))

    @invariant()
    def a_slot_changes_hands_only_when_it_is_not_computed(self) -> None:
        if self.computing is not None:
            assert self.slots.owner(self.computing[1]) == self.computing[0]
            assert self.slots.state(self.computing[1]) == "computing"


TestSwapping = Swapping.TestCase
TestSwapping.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
