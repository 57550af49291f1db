"""Which worker holds which cells of a row, and how far a row has come: what a restore is decided from. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from dejavu.control.plan import RecoveryTier
from dejavu.ids import RowId, WorkerName
from dejavu.kv.layout import LayerRange


class HeldRow(msgspec.Struct, frozen=True, array_like=True):
    """Positions [0, length) of one row, K and V of all heads in these layers, at one worker."""

    row_id: RowId
    layers: LayerRange
    length: int
    is_copy: bool
    """True in a store of copies, False in a pool."""
    in_place: bool = True
    """Of a pool: whether its worker steps on it. False: it has other layers or other places than the plan in force
    wants, and only serves as a source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProgress:
    """An open row as the controller knows it."""

    row_id: RowId
    num_prompt: int
    """Tokens of its prompt."""
    num_tokens: int
    """New tokens so far, all of which its user may have seen."""

    @property
    def num_cells(self) -> int:
        """Positions whose KV the next step needs: all but the newest token's, which that step writes."""
        return self.num_prompt + self.num_tokens - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Positions [0, length) of a row in these layers go from ``source`` into ``target``'s pool.

    Source and target are one worker where a pool was cut anew.
    """

    row_id: RowId
    source: WorkerName
    is_copy: bool
    """Whether the source reads its store of copies or its own pool."""
    target: WorkerName
    layers: LayerRange
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRestore:
    """How one row goes on."""

    row_id: RowId
    tier: RecoveryTier
    length: int
    """Positions [0, length) that every token stage holds once fetched; 0 unless the tier is ``replica``."""
    replayed: int
    """Tokens that were known and are made again, one step each."""
    fetches: tuple[Fetch, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyAgain:
    """Positions [start, stop) of a row leave ``worker``'s pool for its successors again: their copy was lost."""

    worker: WorkerName
    row_id: RowId
    start: int
    stop: int
