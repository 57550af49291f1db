"""``timeline.json``: Chrome trace events that open in Perfetto, a process row for each worker.

Format: the "Trace Event Format", JSON object form; ``X`` complete events in microseconds, ``M`` metadata events.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from dejavu.report.json_file import replace_file
from dejavu.report.spans import CATEGORIES, Span

TRACE_ROWS_A_CATEGORY = 1000
CLOCK_GRAIN_US = 2
"""Neighbouring spans may overlap by this much: a double holds today's time to a quarter of a microsecond."""


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a trace; ``ts`` and ``dur`` in microseconds, ``pid`` a worker, ``tid`` a row of it."""

    name: str
    ph: str
    pid: int
    tid: int | None = None
    ts: int | None = None
    dur: int | None = None
    cat: str | None = None
    args: dict[str, int | float | str | None] | None = None


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A whole trace file."""

    traceEvents: list[TraceEvent]
    displayTimeUnit: str = "ms"
    otherData: dict[str, str | int | float] = {}


def write_timeline(
    path: Path,
    workers: Mapping[str, Sequence[Span]],
    *,
    start_s: float | None = None,
    num_dropped: Mapping[str, int] | None = None,
) -> None:
    """``path`` is a trace that was read back before it replaced the old file.

    ``workers`` in the order of their rows; times count from ``start_s`` (wall clock; by default, or where a span is
    earlier, the earliest span). ``num_dropped`` (spans lost by each recorder) is noted in ``otherData``.
    """
    earliest_s = min((span.start_s for spans in workers.values() for span in spans), default=start_s or 0.0)
    origin_s = earliest_s if start_s is None else min(start_s, earliest_s)
    rows = [_worker_events(pid, name, spans, origin_s) for pid, (name, spans) in enumerate(workers.items(), start=1)]
    metadata = [event for row in rows for event in row if event.ph == "M"]
    complete = [event for row in rows for event in row if event.ph == "X"]
    # Of two events that start together the longer one encloses the other and has to come first.
    complete.sort(key=lambda event: (event.ts or 0, -(event.dur or 0)))
    lost = {f"dropped_spans_{name}": number for name, number in (num_dropped or {}).items() if number}
    trace = Trace(traceEvents=metadata + complete, otherData={"start_s": origin_s, **lost})
    content = msgspec.json.encode(trace)
    check_timeline(content)
    replace_file(path, content)


def read_timeline(path: Path) -> Trace:
    """The trace in ``path``. Raises ValueError when it is none."""
    return check_timeline(path.read_bytes())


def check_timeline(content: bytes) -> Trace:
    """The trace in ``content``: every event names its worker's row, has its times, and lies in order.

    Raises ValueError that names the offending event.
    """
    trace = msgspec.json.decode(content, type=Trace)
    named = {event.pid for event in trace.traceEvents if event.ph == "M" and event.name == "process_name"}
    last_us = 0
    for number, event in enumerate(trace.traceEvents):
        if event.pid not in named:
            raise ValueError(f"event {number} ({event.name}) belongs to process {event.pid}, which has no name")
        if event.ph != "X":
            continue
        if event.ts is None or event.dur is None or event.dur < 0 or event.tid is None:
            raise ValueError(f"event {number} ({event.name}) lacks a row, a start or a duration")
        if event.ts < last_us:
            raise ValueError(f"event {number} ({event.name}) starts at {event.ts} us, before its predecessor")
        last_us = event.ts
    return trace


def _worker_events(pid: int, worker: str, spans: Sequence[Span], origin_s: float) -> list[TraceEvent]:
    """The worker's metadata and complete events; spans of one category that overlap get rows of their own."""
    events = [_metadata("process_name", pid, name=worker), _metadata("process_sort_index", pid, sort_index=pid)]
    for position, category in enumerate(CATEGORIES, start=1):
        own = [span for span in spans if span.category == category]
        first_tid = position * TRACE_ROWS_A_CATEGORY
        num_rows = 0
        for row, event in _in_rows(own, pid, first_tid, origin_s):
            events.append(event)
            num_rows = max(num_rows, row + 1)
        for row in range(num_rows):
            tid = first_tid + row
            name = category if row == 0 else f"{category} {row + 1}"
            events.append(_metadata("thread_name", pid, tid, name=name))
            events.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
    return events


def _in_rows(spans: Sequence[Span], pid: int, first_tid: int, origin_s: float) -> Iterator[tuple[int, TraceEvent]]:
    """Each span with the first row where it follows or lies within what is open there (a viewer shows no crossings)."""
    rows: list[list[tuple[int, int]]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.duration_s)):
        start_us = round((span.start_s - origin_s) * 1e6)
        end_us = max(start_us, round((span.end_s - origin_s) * 1e6))
        row, start_us, end_us = _place(rows, start_us, end_us)
        yield (
            row,
            TraceEvent(
                name=span.name,
                ph="X",
                pid=pid,
                tid=first_tid + row,
                ts=start_us,
                dur=end_us - start_us,
                cat=span.category,
                args={key: _finite(value) for key, value in span.args.items()} or None,
            ),
        )


def _place(rows: list[list[tuple[int, int]]], start_us: int, end_us: int) -> tuple[int, int, int]:
    """The row for [start, end], and its start and end there; the row's stack of open spans is brought up to date."""
    for index, open_spans in enumerate(rows):
        depth, placed_us = len(open_spans), start_us
        while depth and open_spans[depth - 1][1] <= start_us + CLOCK_GRAIN_US and open_spans[depth - 1][1] < end_us:
            depth -= 1
            placed_us = max(placed_us, open_spans[depth][1])
        if depth == 0 or end_us <= open_spans[depth - 1][1]:
            placed_us = max(placed_us, open_spans[depth - 1][0]) if depth else placed_us
            end_us = max(end_us, placed_us)
            open_spans[depth:] = [(placed_us, end_us)]
            return index, placed_us, end_us
    rows.append([(start_us, end_us)])
    return len(rows) - 1, start_us, end_us


def _finite(value: int | float | str) -> int | float | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _metadata(name: str, pid: int, tid: int | None = None, /, **args: int | str) -> TraceEvent:
    return TraceEvent(name=name, ph="M", pid=pid, tid=tid, args=dict(args))
