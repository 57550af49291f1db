"""What messages are made of: rows, and parts of their KV."""

from __future__ import annotations

import msgspec

from dejavu.ids import RowId, WorkerName
from dejavu.kv.box import Span as KvSpan
from dejavu.kv.layout import LayerRange
from dejavu.request import Sampling


class PromptRow(msgspec.Struct, frozen=True, array_like=True):
    """One row of a prompt microbatch."""

    row_id: RowId
    microbatch: int
    row_index: int
    length: int
    """Prompt tokens."""
    sampling: Sampling | None
    """None: greedy, without log-probabilities."""


class KvPart(msgspec.Struct, frozen=True, array_like=True):
    """Cells of one row, all heads. Ranges are [start, stop)."""

    row_id: RowId
    layers: LayerRange
    positions: KvSpan


class RestoredRow(msgspec.Struct, frozen=True, array_like=True):
    """A row that goes on in a new epoch."""

    row_id: RowId
    microbatch: int
    row_index: int
    length: int
    """Positions [0, length) that every stage holds when it goes on."""
    is_here: bool
    """Whether they lie in this stage's pool already; otherwise they will come."""


class CopySpan(msgspec.Struct, frozen=True, array_like=True):
    """Positions [start, stop) of a row whose copy was lost."""

    row_id: RowId
    start: int
    stop: int


class SendPart(msgspec.Struct, frozen=True, array_like=True):
    """Positions [0, length) of a row in these layers, for ``target``'s pool."""

    row_id: RowId
    layers: LayerRange
    length: int
    is_copy: bool
    target: WorkerName
