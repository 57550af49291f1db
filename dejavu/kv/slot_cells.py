"""Rows and cells of a microbatch that is swapped, and a copy of some of them. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dejavu.ids import RowId


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRow:
    """A row of a microbatch: cells [0, length) of it exist."""

    row_id: RowId
    row_index: int
    """Within the microbatch."""
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSpan:
    """Positions [start, stop) of a row."""

    row_id: RowId
    row_index: int
    start: int
    stop: int

    @property
    def num_cells(self) -> int:
        """Positions."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCopy:
    """Cells of one microbatch on their way between the host store and its slot."""

    number: int
    """Of this copy, of all that there ever were."""
    way: Literal["in", "out"]
    slot: int
    microbatch: int
    spans: tuple[CellSpan, ...]

    @property
    def num_cells(self) -> int:
        """Positions of all rows."""
        return sum(span.num_cells for span in self.spans)
