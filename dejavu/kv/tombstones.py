"""Rows that have ended: remembered one by one up to a bound, and older ones by the highest id."""

from __future__ import annotations

from collections import deque

from dejavu.ids import RowId


class Tombstones:
    """Knows ended rows. Row ids grow with every attempt, so an id below a forgotten one is not new.

    Not threadsafe: its owner has a lock.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._rows: set[RowId] = set()
        self._order: deque[RowId] = deque()
        self._forgotten_up_to = -1

    def add(self, row_id: RowId) -> None:
        """The row has ended. Idempotent."""
        if row_id in self._rows:
            return
        self._rows.add(row_id)
        self._order.append(row_id)
        if len(self._order) > self._max_rows:
            forgotten = self._order.popleft()
            self._rows.remove(forgotten)
            self._forgotten_up_to = max(self._forgotten_up_to, forgotten)

    def __contains__(self, row_id: RowId) -> bool:
        return row_id in self._rows or row_id <= self._forgotten_up_to
