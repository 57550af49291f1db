"""Fakes of what copies of rows are made with, for tests of the engine's side of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dejavu.clock import Clock
from dejavu.control.ring import StepRow
from dejavu.engine.copies import Copies
from dejavu.engine.messages import PromptRow
from dejavu.engine.pool_rows import PoolRows
from dejavu.ids import RowId
from dejavu.kv.chunk import StepMark
from dejavu.kv.layout import LayerRange
from dejavu.kv.levels import StreamingLevel
from dejavu.kv.route import RowSpan
from dejavu.kv.stream_account import StreamStalled

from harness.streamer_kit import numbered_pool

A, B, C = RowId(1), RowId(2), RowId(3)
ROWS_PER_MICROBATCH = 2


class FakeStreamer:
    """Notes what it is asked for. ``kept`` are the rows whose layers it would still have."""

    def __init__(self, kept: Sequence[RowId] = (), *, stalls: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._kept, self._stalls = kept, stalls
        self.on_submit: Callable[[tuple[RowId, ...]], None] = lambda row_ids: None

    def submit(self, layer: int, keys: torch.Tensor, values: torch.Tensor, rows: Sequence[RowSpan]) -> None:
        self.calls.append(("submit", layer, tuple(rows)))

    def submit_rows(
        self,
        pool: object,
        rows: Sequence[Any],
        *,
        made_by: str,
        layers: object = None,
        mark: StepMark | None = None,
    ) -> None:
        if self._stalls:
            raise StreamStalled("the queue is full")
        self.calls.append(("submit_rows", tuple(rows), made_by, layers if mark is None else mark))
        self.on_submit(tuple(row.span.row_id for row in rows))

    def settle(self, places: frozenset[int]) -> None:
        self.calls.append(("settle", set(places)))

    def send_again(self, jobs: Sequence[Any]) -> None:
        self.calls += [("send_again", job) for job in jobs]

    def retained(self, row_id: RowId, layers: LayerRange) -> tuple[object, ...] | None:
        return ((row_id, layers),) if row_id in self._kept else None

    def set_level(self, level: StreamingLevel) -> None:
        self.calls.append(("set_level", level))

    def drain(self, timeout_s: float) -> None:
        self.calls.append(("drain", timeout_s))
        if self._stalls:
            raise StreamStalled("not in time")

    def end_pass(self) -> None:
        self.calls.append(("end_pass",))

    def abandon_pass(self) -> None:
        self.calls.append(("abandon_pass",))

    def close(self) -> None:
        self.calls.append(("close",))


class FakeDisk:
    """Notes the rows that were dropped."""

    def __init__(self) -> None:
        self.dropped: list[RowId] = []
        self.is_closed = False

    def drop(self, row_id: RowId) -> None:
        self.dropped.append(row_id)

    def close(self) -> None:
        self.is_closed = True


def prompt(row_id: RowId, microbatch: int, row_index: int, length: int) -> PromptRow:
    return PromptRow(row_id, microbatch, row_index, length, None)


def step_row(row_id: RowId, row_index: int, position: int) -> StepRow:
    return StepRow(row_id, row_index, position, 0, None)


def written_rows() -> PoolRows:
    """A has 3 positions at place 0, B has 5 at place 3."""
    rows = PoolRows(ROWS_PER_MICROBATCH)
    rows.begin([prompt(A, 0, 0, 3), prompt(B, 1, 1, 5)])
    rows.written(A, 3)
    rows.written(B, 5)
    return rows


def copies_of(
    streamer: FakeStreamer,
    disk: FakeDisk | None = None,
    rows: PoolRows | None = None,
    lost: deque[RowId] | None = None,
    *,
    copy_steps: int = 1,
    clock: Clock | None = None,
) -> Copies:
    """Copies of ``written_rows``."""
    rows, lost = rows or written_rows(), deque() if lost is None else lost
    return Copies(streamer, numbered_pool(), rows, lost, disk, copy_steps=copy_steps, clock=clock)  # type: ignore[arg-type]
