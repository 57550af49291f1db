"""Which rows lie in a stage's pool, where, and how many positions of each are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dejavu.control.holdings import HeldRow
from dejavu.engine.messages import PromptRow
from dejavu.ids import RowId
from dejavu.kv.layout import LayerRange


@dataclass(slots=True)
class _Placed:
    place: int
    length: int


class PoolRows:
    """The table of one pool; it outlives epochs as the pool does. Main thread only.

    A place belongs to the row that began there last.
    """

    def __init__(self, microbatch_rows: int) -> None:
        self._microbatch_rows = microbatch_rows
        self._rows: dict[RowId, _Placed] = {}

    @property
    def microbatch_rows(self) -> int:
        """So many rows of the pool belong to each microbatch."""
        return self._microbatch_rows

    def place(self, microbatch: int, row_index: int) -> int:
        """The pool's row of that place."""
        return microbatch * self._microbatch_rows + row_index

    def begin(self, rows: Sequence[PromptRow]) -> frozenset[int]:
        """The rows have their places, nothing of them written yet, and whoever was there is forgotten."""
        places = {row.row_id: self.place(row.microbatch, row.row_index) for row in rows}
        taken = frozenset(places.values())
        self._rows = {row_id: row for row_id, row in self._rows.items() if row.place not in taken}
        self._rows.update({row_id: _Placed(place, 0) for row_id, place in places.items()})
        return taken

    def written(self, row_id: RowId, length: int) -> None:
        """Positions [0, length) of the row are in the pool, in all of its layers. Ignored for a row without a place."""
        row = self._rows.get(row_id)
        if row is not None:
            row.length = length

    def place_of(self, row_id: RowId) -> int | None:
        """Where the row lies, or None."""
        row = self._rows.get(row_id)
        return None if row is None else row.place

    def length_of(self, row_id: RowId) -> int:
        """Positions that are written; 0 for a row that is not here."""
        row = self._rows.get(row_id)
        return 0 if row is None else row.length

    def of_microbatch(self, microbatch: int) -> list[tuple[RowId, int, int]]:
        """Its rows that have something written: row, index within the microbatch, positions."""
        first = self.place(microbatch, 0)
        return [
            (row_id, row.place - first, row.length)
            for row_id, row in self._rows.items()
            if row.length and 0 <= row.place - first < self._microbatch_rows
        ]

    def by_microbatch(self) -> dict[int, int]:
        """How many rows of each microbatch have something written."""
        return dict(Counter(row.place // self._microbatch_rows for row in self._rows.values() if row.length))

    @property
    def num_positions(self) -> int:
        """Positions that are written, of all rows."""
        return sum(row.length for row in self._rows.values())

    def release(self, row_ids: Iterable[RowId]) -> None:
        """The rows are forgotten."""
        for row_id in row_ids:
            self._rows.pop(row_id, None)

    def held(self, layers: LayerRange, *, in_place: bool = True) -> tuple[HeldRow, ...]:
        """The rows that have something written; ``in_place`` tells whether the pool is the one that is stepped on."""
        return tuple(
            HeldRow(row_id, layers, row.length, False, in_place) for row_id, row in self._rows.items() if row.length
        )
