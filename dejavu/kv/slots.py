"""Which microbatch has which slot of a device that swaps, and which of its cells are there. Pure: it copies nothing.

Whoever makes the copies takes them from ``next_copy``, one after the other or several at once, and says when each is
``done``. A slot is empty, coming in, in, computing, or going out; it goes to another microbatch only when every cell
that was made in it is in the host store (DejaVu §4.2.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from dejavu.errors import InvalidTransition
from dejavu.ids import RowId
from dejavu.kv.slot_cells import CellSpan, SlotCopy, SlotRow

SlotState: TypeAlias = Literal["empty", "coming in", "in", "computing", "going out"]
NUM_SLOTS = 2
"""The microbatch that is computed, and the one that comes or goes."""


@dataclass(slots=True)
class _Cells:
    """What a slot has of one row: cells [0, valid), of which [0, out) are in the host store, too."""

    row_id: RowId
    valid: int = 0
    out: int = 0
    out_asked: int = 0
    """Cells [out, out_asked) are on their way out."""
    unused: int = 0
    """Cells that came in and no step has read."""


@dataclass(slots=True)
class _Slot:
    microbatch: int | None = None
    is_computing: bool = False
    rows: dict[int, _Cells] = field(default_factory=dict)
    """By index within the microbatch."""
    under_way: dict[int, SlotCopy] = field(default_factory=dict)
    """By number."""

    @property
    def is_clean(self) -> bool:
        """Nothing of it is missing in the host store, and nothing is being copied."""
        return not self.under_way and all(cells.out == cells.valid for cells in self.rows.values())

    @property
    def is_coming_in(self) -> bool:
        return any(copy.way == "in" for copy in self.under_way.values())


class Slots:
    """One owner at a time: callers on several threads hold a lock."""

    def __init__(self) -> None:
        self._slots = [_Slot() for _ in range(NUM_SLOTS)]
        self._needed: tuple[int, tuple[SlotRow, ...]] | None = None
        self._expected: tuple[int, tuple[SlotRow, ...]] | None = None
        self._num_copies = 0
        self.unused_cells = 0
        """Cells that were brought in for nothing: their row ended, or another microbatch got the slot."""

    def need(self, microbatch: int, rows: Sequence[SlotRow]) -> None:
        """These rows' step is due: what is missing of them comes in before anything else."""
        self._needed = (microbatch, tuple(rows))

    def expect(self, microbatch: int, rows: Sequence[SlotRow]) -> None:
        """These rows are likely to be needed next: they come in when nothing more urgent is to be copied."""
        self._expected = (microbatch, tuple(rows))

    def next_copy(self) -> SlotCopy | None:
        """The next copy to make; it is under way from now on. None while there is nothing that may be copied."""
        return self.next_out() or self._next_in(self._needed) or self._next_in(self._expected)

    @property
    def is_short(self) -> bool:
        """Something that is needed or expected is not in."""
        return any(one is not None and not self.is_ready(*one) for one in (self._needed, self._expected))

    def next_out(self) -> SlotCopy | None:
        """As ``next_copy``, of new cells that are not in the host store."""
        for index, slot in enumerate(self._slots):
            spans = []
            for row_index, cells in slot.rows.items():
                start = max(cells.out, cells.out_asked)
                if start < cells.valid:
                    spans.append(CellSpan(row_id=cells.row_id, row_index=row_index, start=start, stop=cells.valid))
                    cells.out_asked = cells.valid
            if spans:
                return self._begin_copy("out", index, spans)
        return None

    def done(self, copy: SlotCopy) -> None:
        """The copy has been made. Raises InvalidTransition for one that is not under way."""
        slot = self._slots[copy.slot]
        if slot.under_way.pop(copy.number, None) is None:
            raise InvalidTransition(f"copy {copy.number} of microbatch {copy.microbatch} is not under way")
        for span in copy.spans:
            cells = slot.rows.get(span.row_index)
            # The row may have ended meanwhile, and another have its place.
            if cells is None or cells.row_id != span.row_id:
                self.unused_cells += span.num_cells if copy.way == "in" else 0
            elif copy.way == "out":
                cells.out = span.stop
            else:
                cells.valid = cells.out = cells.out_asked = span.stop
                cells.unused += span.num_cells

    def is_ready(self, microbatch: int, rows: Sequence[SlotRow]) -> bool:
        """The microbatch has a slot with all cells of these rows, and nothing comes into it any more."""
        slot = self._of(microbatch)
        return slot is not None and not slot.is_coming_in and not _missing(slot, rows)

    def begin_step(self, microbatch: int, rows: Sequence[SlotRow]) -> int:
        """The rows' step is computed in the slot that is returned. Raises InvalidTransition unless ``is_ready``."""
        slot = self._of(microbatch)
        if slot is None or not self.is_ready(microbatch, rows) or any(one.is_computing for one in self._slots):
            raise InvalidTransition(f"microbatch {microbatch} cannot be computed: {self.describe()}")
        slot.is_computing = True
        self._needed = None
        if self._expected is not None and self._expected[0] == microbatch:
            self._expected = None
        for row in rows:
            slot.rows[row.row_index].unused = 0
        return self._slots.index(slot)

    def end_step(self, microbatch: int, rows: Sequence[SlotRow]) -> None:
        """Each of the rows has its cell ``length``, in the slot alone. Raises InvalidTransition without a step."""
        slot = self._of(microbatch)
        if slot is None or not slot.is_computing:
            raise InvalidTransition(f"microbatch {microbatch} was not computed: {self.describe()}")
        slot.is_computing = False
        for row in rows:
            cells = slot.rows.get(row.row_index)
            if cells is not None and cells.row_id == row.row_id:
                cells.valid = row.length + 1
                cells.out, cells.out_asked = min(cells.out, row.length), min(cells.out_asked, row.length)

    def forget(self, microbatch: int, row_indices: Iterable[int]) -> None:
        """Whatever lies at these places of the microbatch is of nobody any more, and need not go out."""
        gone, slot = frozenset(row_indices), self._of(microbatch)
        if self._expected is not None and self._expected[0] == microbatch:
            self.expect(microbatch, [row for row in self._expected[1] if row.row_index not in gone])
        if slot is not None:
            for row_index in gone:
                self._drop(slot, row_index)

    def is_copying(self, microbatch: int, row_indices: frozenset[int]) -> bool:
        """A copy from or to one of these places of the host store is under way."""
        return any(
            copy.microbatch == microbatch and any(span.row_index in row_indices for span in copy.spans)
            for slot in self._slots
            for copy in slot.under_way.values()
        )

    def is_stored(self, microbatch: int) -> bool:
        """The host store has every cell of the microbatch."""
        slot = self._of(microbatch)
        return slot is None or all(cells.out == cells.valid for cells in slot.rows.values())

    @property
    def is_all_stored(self) -> bool:
        """The host store has every cell; others may still be coming in."""
        return all(cells.out == cells.valid for slot in self._slots for cells in slot.rows.values())

    @property
    def is_out(self) -> bool:
        """The host store has every cell, and nothing is being copied."""
        return all(slot.is_clean for slot in self._slots)

    @property
    def stored_in_part(self) -> list[tuple[RowId, int]]:
        """Rows of which the host store lacks the newest cells, each with how many it has from the first."""
        return [
            (cells.row_id, cells.out) for slot in self._slots for cells in slot.rows.values() if cells.out < cells.valid
        ]

    def rest(self) -> None:
        """Nothing is needed or expected: no more copies in begin."""
        self._needed = self._expected = None

    def clear(self) -> None:
        """Every slot is empty, and nothing is needed or expected. Raises InvalidTransition unless ``is_out``."""
        if not self.is_out:
            raise InvalidTransition(f"the host store does not have every cell: {self.describe()}")
        self.rest()
        for slot in self._slots:
            self._empty(slot)

    def owner(self, slot: int) -> int | None:
        """The microbatch that has the slot."""
        return self._slots[slot].microbatch

    def state(self, slot: int) -> SlotState:
        """What happens in the slot."""
        one = self._slots[slot]
        if one.is_computing:
            return "computing"
        if one.microbatch is None:
            return "empty"
        if one.is_coming_in:
            return "coming in"
        return "in" if one.is_clean else "going out"

    def describe(self) -> str:
        """Every slot in words, for an error."""
        return ", ".join(
            f"slot {index} {self.state(index)}"
            + ("" if slot.microbatch is None else f" (microbatch {slot.microbatch}, rows {_shown(slot)})")
            for index, slot in enumerate(self._slots)
        )

    def _next_in(self, wanted: tuple[int, tuple[SlotRow, ...]] | None) -> SlotCopy | None:
        if wanted is None:
            return None
        microbatch, rows = wanted
        slot = self._of(microbatch) or self._take(microbatch)
        # Two copies into the same cells would be for nothing, and the step may rely on what is there.
        if slot is None or slot.is_computing or slot.is_coming_in:
            return None
        missing = _missing(slot, rows)
        for span in missing:
            cells = slot.rows.get(span.row_index)
            if cells is None or cells.row_id != span.row_id:
                self._drop(slot, span.row_index)
                slot.rows[span.row_index] = _Cells(span.row_id)
        return self._begin_copy("in", self._slots.index(slot), missing) if missing else None

    def _take(self, microbatch: int) -> _Slot | None:
        """A slot that nobody has, or whose microbatch can do without it, is this one's."""
        wanted = {one[0] for one in (self._needed, self._expected) if one is not None}
        others = [slot for slot in self._slots if not slot.is_computing and slot.microbatch not in wanted]
        slot = next((slot for slot in others if slot.microbatch is None), None)
        slot = slot or next((slot for slot in others if slot.is_clean), None)
        if slot is not None:
            self._empty(slot)
            slot.microbatch = microbatch
        return slot

    def _begin_copy(self, way: Literal["in", "out"], index: int, spans: Sequence[CellSpan]) -> SlotCopy:
        slot = self._slots[index]
        assert slot.microbatch is not None
        self._num_copies += 1
        copy = SlotCopy(number=self._num_copies, way=way, slot=index, microbatch=slot.microbatch, spans=tuple(spans))
        slot.under_way[copy.number] = copy
        return copy

    def _of(self, microbatch: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.microbatch == microbatch), None)

    def _empty(self, slot: _Slot) -> None:
        for row_index in list(slot.rows):
            self._drop(slot, row_index)
        slot.microbatch = None

    def _drop(self, slot: _Slot, row_index: int) -> None:
        cells = slot.rows.pop(row_index, None)
        self.unused_cells += 0 if cells is None else cells.unused


def _missing(slot: _Slot, rows: Sequence[SlotRow]) -> list[CellSpan]:
    """What the slot has not of these rows."""
    spans = []
    for row in rows:
        cells = slot.rows.get(row.row_index)
        valid = cells.valid if cells is not None and cells.row_id == row.row_id else 0
        if valid < row.length:
            spans.append(CellSpan(row_id=row.row_id, row_index=row.row_index, start=valid, stop=row.length))
    return spans


def _shown(slot: _Slot) -> str:
    return "; ".join(
        f"{index}: row {cells.row_id} [0, {cells.valid}), out [0, {cells.out})" for index, cells in slot.rows.items()
    )
