"""Rows that go on in a new epoch, at one token stage: some lie in its pool, the others come from copies."""

from __future__ import annotations

from collections.abc import Sequence

from dejavu.engine import messages as m
from dejavu.engine.landed import LandedRows
from dejavu.engine.outflow import Outflow
from dejavu.engine.pool_rows import PoolRows
from dejavu.ids import RowId


class Restoring:
    """Main thread only."""

    def __init__(self, rows: PoolRows, landed: LandedRows, out: Outflow) -> None:
        self._rows = rows
        self._landed = landed
        self._out = out
        self._to_come: set[RowId] = set()
        self._copies: dict[RowId, m.CopySpan] = {}

    def begin(self, message: m.RestoreRows) -> tuple[tuple[RowId, ...], tuple[RowId, ...]]:
        """The rows have their places. Returns those that are whole here now, and those whose KV has just landed."""
        self._copies = {span.row_id: span for span in message.copies}
        here = [row for row in message.rows if row.is_here]
        away = [_prompt_row(row) for row in message.rows if not row.is_here]
        for row in here:
            self._rows.written(row.row_id, row.length)
        self._to_come = {row.row_id for row in away}
        self._rows.begin(away)
        self.copy_again([row.row_id for row in here])
        return tuple(row.row_id for row in here), self._landed.expect(away)

    def take(self, row_ids: Sequence[RowId]) -> tuple[RowId, ...]:
        """These rows have landed. Returns those that are not restored ones: their copies are for the caller."""
        restored = [row_id for row_id in row_ids if row_id in self._to_come]
        self._to_come.difference_update(restored)
        self.copy_again(restored)
        return tuple(row_id for row_id in row_ids if row_id not in set(restored))

    def copy_again(self, row_ids: Sequence[RowId]) -> None:
        """What was lost of these rows' copies is on its way."""
        spans = [self._copies.pop(row_id) for row_id in row_ids if row_id in self._copies]
        self._out.again([(span.row_id, span.start, span.stop) for span in spans])


def _prompt_row(row: m.RestoredRow) -> m.PromptRow:
    return m.PromptRow(row.row_id, row.microbatch, row.row_index, row.length, None)
