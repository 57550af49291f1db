"""How far a run has come, for the person who waits: bars on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType
from typing import Literal, Protocol, TextIO, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from dejavu.clock import Clock
from dejavu.report.amounts import printable, show_bytes, show_count, show_rate, show_seconds, show_share
from dejavu.report.lossy_stream import lossy

Unit: TypeAlias = Literal["bytes", "items"]
REFRESHES_A_SECOND = 4
"""Enough for a person; each costs a moment of a core that may be computing."""


class Progress(Protocol):
    """Told about a run's progress. Any thread; returns at once; cheap enough to be told of every token."""

    def phase(self, description: str, done: float, total: float | None, unit: Unit = "items") -> None:
        """A phase of the start-up stands at ``done`` of ``total`` (None: unknown). Ends when they are equal."""

    def requests(self, ended: int, submitted: int, num_tokens: int, num_failed: int = 0) -> None:
        """``ended`` of ``submitted`` requests are over (``num_failed`` of them failed), ``num_tokens`` generated."""

    def batches(self, done: float, total: int, what: str) -> None:
        """``done`` of ``total`` batches of a measurement are over, a part of one included; ``what`` is under way."""

    def note(self, text: str) -> None:
        """A person sees ``text`` as a line that stays, among the phases that have ended."""

    def close(self) -> None:
        """Nothing more is shown. Idempotent."""


class SilentProgress:
    """Shows nothing."""

    def phase(self, description: str, done: float, total: float | None, unit: Unit = "items") -> None:
        """Nothing is shown."""

    def requests(self, ended: int, submitted: int, num_tokens: int, num_failed: int = 0) -> None:
        """Nothing is shown."""

    def batches(self, done: float, total: int, what: str) -> None:
        """Nothing is shown."""

    def note(self, text: str) -> None:
        """Nothing is shown."""

    def close(self) -> None:
        """Nothing was shown."""


class RichProgress:
    """Progress on a console: a bar a phase and one for the requests, or plain lines where it cannot redraw.

    While it is open, log lines for the same terminal appear above the bars. Close it before the final report.
    Nothing is raised where nothing can be printed: the work is worth more than the news of it.
    """

    def __init__(self, console: Console, clock: Clock, *, line_interval_s: float = 5.0) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._display: _Bars | _Lines = (
            _Bars(lossy(console)) if console.is_interactive else _Lines(lossy(console), clock, line_interval_s)
        )
        self._phase_since_s: dict[str, float] = {}
        self._ended_phases: set[str] = set()
        self._serving_since_s: float | None = None
        self._num_tokens = 0
        self._is_closed = False

    def phase(self, description: str, done: float, total: float | None, unit: Unit = "items") -> None:
        """A phase of the start-up stands at ``done`` of ``total`` (None: unknown). Ends when they are equal."""
        with self._lock:
            if self._is_closed or description in self._ended_phases:
                return
            now_s = self._clock.monotonic()
            since_s = self._phase_since_s.setdefault(description, now_s)
            if total is None or done < total:
                self._display.show(description, done, total, _amount(done, total, unit))
                return
            self._ended_phases.add(description)
            took = f" in {show_seconds(now_s - since_s)}" if now_s > since_s else ""
            self._display.end(description, _amount(total, None if unit == "bytes" else total, unit) + took)

    def requests(self, ended: int, submitted: int, num_tokens: int, num_failed: int = 0) -> None:
        """``ended`` of ``submitted`` requests are over (``num_failed`` of them failed), ``num_tokens`` generated."""
        with self._lock:
            if self._is_closed:
                return
            now_s = self._clock.monotonic()
            if self._serving_since_s is None or num_tokens < self._num_tokens:
                # Fewer than before: another run of requests has begun.
                self._serving_since_s = now_s
            self._num_tokens = num_tokens
            elapsed_s = now_s - self._serving_since_s
            amount = f"{ended:,}/{submitted:,}, {show_count(num_tokens, 'token')}"
            if num_tokens and elapsed_s > 0:
                amount += f", {show_rate(num_tokens / elapsed_s, 'tokens')}"
            if num_failed:
                amount += f", {num_failed:,} failed"
            self._display.show("requests", ended, submitted, amount)

    def batches(self, done: float, total: int, what: str) -> None:
        """``done`` of ``total`` batches of a measurement are over, a part of one included; ``what`` is under way."""
        with self._lock:
            if not self._is_closed:
                self._display.show("batches", done, total, f"{int(done):,} of {total:,}, {what}")

    def note(self, text: str) -> None:
        """``text`` is a line above the bars."""
        with self._lock:
            if not self._is_closed:
                self._display.note(text)

    def close(self) -> None:
        """The last state stays on the terminal, the cursor and the loggers are as before. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._display.close()

    def __enter__(self) -> RichProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Bars:
    """Bars that stay below everything else that is printed."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[amount]}", markup=False),
            console=console,
            refresh_per_second=REFRESHES_A_SECOND,
            # A stream that goes to a file stays the file's, also when the other one is the terminal with the bars.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._tasks: dict[str, TaskID] = {}
        self._moved: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        self._is_started = False

    def show(self, description: str, done: float, total: float | None, amount: str) -> None:
        """The bar of that description stands at ``done``; the first one starts the display."""
        if not self._is_started:
            self._start()
        task = self._tasks.get(description)
        if task is None:
            task = self._tasks[description] = self._bars.add_task(printable(description), total=total, amount=amount)
        self._bars.update(task, completed=done, total=total, amount=amount)

    def end(self, description: str, amount: str) -> None:
        """The phase's bar has become a line above the bars that are left."""
        task = self._tasks.pop(description, None)
        if task is not None:
            self._bars.remove_task(task)
        self._bars.console.print(f"{printable(description)}: {amount}", style="dim", markup=False, highlight=False)

    def note(self, text: str) -> None:
        """The line stands above the bars."""
        self._bars.console.print(printable(text), style="dim", markup=False, highlight=False)

    def close(self) -> None:
        """The bars stand still and the log handlers write where they wrote before."""
        if self._is_started:
            self._bars.stop()
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._moved.clear()

    def _start(self) -> None:
        """Log handlers that hold the terminal's own streams write through the display, which prints above the bars."""
        streams = {id(sys.stdout): "stdout", id(sys.stderr): "stderr"}
        self._bars.start()
        self._is_started = True
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and id(handler.stream) in streams:
                self._moved.append((handler, handler.stream))
                handler.setStream(getattr(sys, streams[id(handler.stream)]))


class _Lines:
    """A line at most every ``interval_s`` seconds, one for each phase that has ended, and one for the last state."""

    def __init__(self, console: Console, clock: Clock, interval_s: float) -> None:
        self._console = console
        self._clock = clock
        self._interval_s = interval_s
        self._shown_s = clock.monotonic()
        self._pending: str | None = None

    def show(self, description: str, done: float, total: float | None, amount: str) -> None:
        """The state is printed if the last line is old enough; else it is kept, and the next one takes its place."""
        self._pending = f"{printable(description)}: {amount}"
        if self._clock.monotonic() - self._shown_s >= self._interval_s:
            self._print()

    def end(self, description: str, amount: str) -> None:
        """The end of a phase is printed."""
        self._pending = f"{printable(description)}: {amount}"
        self._print()

    def note(self, text: str) -> None:
        """The line is printed."""
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """The last state was printed."""
        self._print()

    def _print(self) -> None:
        if self._pending is not None:
            self._console.print(self._pending, markup=False, highlight=False, soft_wrap=True)
            self._pending = None
            self._shown_s = self._clock.monotonic()


def _amount(done: float, total: float | None, unit: Unit) -> str:
    """``34.2 MB of 98.1 MB (35 %)`` or ``3 of 30``; without a total what is done."""
    if unit == "bytes":
        shown, whole = show_bytes(done), None if total is None else show_bytes(total)
    else:
        shown, whole = f"{done:,.0f}", None if total is None else f"{total:,.0f}"
    if whole is None:
        return shown
    if total is None or total <= 0 or unit == "items":
        return f"{shown} of {whole}"
    return f"{shown} of {whole} ({show_share(done / total)})"
