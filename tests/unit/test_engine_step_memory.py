"""Steps in slots: what the table of rows says when the host store has not got everything."""

from __future__ import annotations

import itertools

import pytest

from dejavu.control.ring import StepRow
from dejavu.engine.messages import PromptRow
from dejavu.engine.pool_rows import PoolRows
from dejavu.engine.step_memory import Swapped
from dejavu.ids import RowId
from dejavu.kv import swapper
from dejavu.kv.device import Mark
from dejavu.kv.slot_cells import SlotCopy
from dejavu.kv.slot_copies import SlotCopies

from harness.swap_kit import MICROBATCHES, ROWS, Background, swappers


def test_a_cell_whose_copy_out_failed_is_in_the_table_no_longer_when_the_epoch_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(SlotCopies):
        def make(self, copy: SlotCopy, after: Mark) -> int:
            if copy.way == "out":
                raise RuntimeError("the bus is on fire")
            return super().make(copy, after)

    monkeypatch.setattr(swapper, "SlotCopies", Broken)
    table, ticks = PoolRows(ROWS), itertools.count()
    table.begin([PromptRow(RowId(number), 0, number, 5, None) for number in range(2)])
    for number in range(2):
        table.written(RowId(number), 5)
    with swappers() as swap:
        swapping = swap(copier=Background())
        memory = Swapped(
            swapping, table, swapping._copies._slots, num_microbatches=MICROBATCHES, microbatch_rows=ROWS,
            are_copied=False, now=lambda: float(next(ticks)),
        )  # fmt: skip
        rows = [StepRow(RowId(0), 0, 5, 7, None)]
        memory.begin(0, rows)
        memory.end(0, rows)
        # Nobody takes the new cell from the host store, so the step goes on without it.
        table.written(RowId(0), 6)
        memory.close()
    assert (table.length_of(RowId(0)), table.length_of(RowId(1))) == (5, 5)
