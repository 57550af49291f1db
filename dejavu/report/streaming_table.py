"""The measurement of streaming in rows: every single batch (``rounds.csv``) and the medians (``table.csv``)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import TypeAlias

from rich import box
from rich.table import Table

from dejavu.report.json_file import replace_file
from dejavu.report.streaming_times import StreamingTimes

OFF, FULL = "off", "full"
"""The levels between which a slowdown is told."""

Cell: TypeAlias = str | int | float
Columns: TypeAlias = dict[str, Cell]
"""A row of a table by column; its order is the columns' order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """One measured batch."""

    model: str
    destination: str
    batch: int
    """Rows."""
    round_index: int
    turn: int
    """Its place among the levels of its round."""
    level: str
    latency_s: float
    times: StreamingTimes

    @property
    def columns(self) -> Columns:
        """Its row of ``rounds.csv``."""
        times = self.times
        return {
            "model": self.model,
            "destination": self.destination,
            "batch": self.batch,
            "round": self.round_index,
            "turn": self.turn,
            "level": self.level,
            "latency_s": self.latency_s,
            "steps": times.steps,
            "transfers_per_step": times.transfers_per_step,
            "streaming_ms_per_step": times.streaming_ms_per_step,
            "exposed_ms_per_step": times.exposed_ms_per_step,
            "step_exposed_ms_per_step": times.step_exposed_ms_per_step,
            "prompt_transfers": times.prompt_transfers,
            "prompt_streaming_ms": times.prompt_streaming_s * 1e3,
            "prompt_exposed_ms": times.prompt_exposed_s * 1e3,
            "streamed_bytes": times.streamed_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All rounds of one level, model, destination and batch size: medians."""

    model: str
    destination: str
    batch: int
    level: str
    latency_s: float
    slowdowns: tuple[float, ...]
    """Of each round, against ``off`` in the same round: what slows the machine down for a while slows both."""
    transfers_per_step: float
    streaming_ms_per_step: float
    exposed_ms_per_step: float

    @property
    def slowdown(self) -> float:
        """The median over the rounds."""
        return median(self.slowdowns)


def summarise(rows: Sequence[BatchRow]) -> list[Summary]:
    """A summary for each (model, destination, batch, level), in the order in which they first came.

    Raises ValueError for a round without ``off``.
    """
    off_s = {(_place(row), row.round_index): row.latency_s for row in rows if row.level == OFF}
    groups: dict[tuple[str, str, int, str], list[BatchRow]] = {}
    for row in rows:
        if (_place(row), row.round_index) not in off_s:
            raise ValueError(f"round {row.round_index} of {_place(row)} has no level off to compare {row.level} with")
        groups.setdefault((*_place(row), row.level), []).append(row)
    return [
        Summary(
            model=model,
            destination=destination,
            batch=batch,
            level=level,
            latency_s=median(row.latency_s for row in own),
            slowdowns=tuple(row.latency_s / off_s[_place(row), row.round_index] for row in own),
            transfers_per_step=median(row.times.transfers_per_step for row in own),
            streaming_ms_per_step=median(row.times.streaming_ms_per_step for row in own),
            exposed_ms_per_step=median(row.times.exposed_ms_per_step for row in own),
        )
        for (model, destination, batch, level), own in groups.items()
    ]


def by_level(summaries: Iterable[Summary]) -> list[Columns]:
    """The rows of ``table.csv`` of the comparison of levels (DejaVu Fig. 11)."""
    return [
        {
            "model": one.model,
            "destination": one.destination,
            "level": one.level,
            "latency_s": one.latency_s,
            "slowdown": one.slowdown,
            "transfers_per_step": one.transfers_per_step,
            "streaming_ms_per_step": one.streaming_ms_per_step,
            "exposed_ms_per_step": one.exposed_ms_per_step,
        }
        for one in summaries
    ]


def by_batch(summaries: Sequence[Summary]) -> list[Columns]:
    """The rows of ``table.csv`` of ``off`` against ``full`` over batch sizes (DejaVu Fig. 27)."""
    off_s = {(one.model, one.destination, one.batch): one.latency_s for one in summaries if one.level == OFF}
    return [
        {
            "model": one.model,
            "batch": one.batch,
            "destination": one.destination,
            "latency_off_s": off_s[one.model, one.destination, one.batch],
            "latency_full_s": one.latency_s,
            "slowdown": one.slowdown,
        }
        for one in summaries
        if one.level == FULL
    ]


def write_table(path: Path, rows: Sequence[Columns]) -> None:
    """``path`` is a CSV file with a heading; a reader sees the old one or the whole new one."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({column: shown(cell) for column, cell in row.items()} for row in rows)
    replace_file(path, text.getvalue().encode())


def as_text(rows: Sequence[Columns]) -> Table:
    """The rows for a terminal: names to the left, numbers to the right with three digits."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold", pad_edge=False, padding=0)
    for column, cell in rows[0].items():
        # A word a line: eighty columns are few.
        heading = "to" if column == "destination" else column.replace("_", "\n")
        table.add_column(heading, justify="left" if isinstance(cell, str) else "right")
    for row in rows:
        table.add_row(*(f"{cell:#.4g}".rstrip(".") if isinstance(cell, float) else str(cell) for cell in row.values()))
    return table


def shown(cell: Cell) -> str:
    """Six significant digits of a number that is not whole."""
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


class RoundsFile:
    """``rounds.csv``: a line is with the operating system as soon as it is written, so an interrupted run keeps it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._has_heading = False

    def write(self, row: BatchRow) -> None:
        """The batch has its line."""
        columns = row.columns
        writer = csv.DictWriter(self._file, fieldnames=list(columns), lineterminator="\n")
        if not self._has_heading:
            writer.writeheader()
            self._has_heading = True
        writer.writerow({column: shown(cell) for column, cell in columns.items()})
        self._file.flush()

    def close(self) -> None:
        """The file is closed. Idempotent."""
        self._file.close()

    def __enter__(self) -> RoundsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _place(row: BatchRow) -> tuple[str, str, int]:
    return row.model, row.destination, row.batch
