"""Progress: bars on a terminal, few lines elsewhere, and the log undisturbed."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator

import pytest
from rich.console import Console

from dejavu.clock import VirtualClock
from dejavu.report.progress import Progress, RichProgress, SilentProgress


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(100.0)


@pytest.fixture
def root_handler() -> Iterator[logging.StreamHandler[io.StringIO]]:
    """A handler on the root logger; taken off afterwards."""
    handler: logging.StreamHandler[io.StringIO] = logging.StreamHandler(io.StringIO())
    root = logging.getLogger()
    root.addHandler(handler)
    yield handler
    root.removeHandler(handler)


@pytest.fixture(autouse=True)
def _capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the test run does not decide what a terminal can do."""
    monkeypatch.setenv("TERM", "xterm")


def piped(clock: VirtualClock) -> tuple[RichProgress, io.StringIO]:
    file = io.StringIO()
    return RichProgress(Console(file=file, width=80, force_terminal=False), clock, line_interval_s=5.0), file


def visible(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_piped_progress_prints_at_most_a_line_an_interval_and_the_last_state(clock: VirtualClock) -> None:
    progress, file = piped(clock)
    for ended in range(21):
        progress.requests(ended, 100, ended * 10)
        clock.advance(1.0)
    progress.close()
    assert file.getvalue().splitlines() == [
        "requests: 5/100, 50 tokens, 10.0 tokens/s",
        "requests: 10/100, 100 tokens, 10.0 tokens/s",
        "requests: 15/100, 150 tokens, 10.0 tokens/s",
        "requests: 20/100, 200 tokens, 10.0 tokens/s",
    ]


def test_piped_progress_prints_each_ended_phase_once(clock: VirtualClock) -> None:
    progress, file = piped(clock)
    for done in (0, 30_000_000, 98_100_000, 98_100_000):
        progress.phase("fetch SmolLM2", done, 98_100_000, "bytes")
        clock.advance(0.5)
    progress.phase("load w0", 30, 30)
    progress.close()
    assert file.getvalue().splitlines() == ["fetch SmolLM2: 98.1 MB in 1.00 s", "load w0: 30 of 30"]


def test_slow_phase_shows_how_far_it_is(clock: VirtualClock) -> None:
    progress, file = piped(clock)
    progress.phase("fetch", 0, 98_100_000, "bytes")
    clock.advance(6.0)
    progress.phase("fetch", 49_050_000, 98_100_000, "bytes")
    clock.advance(6.0)
    progress.phase("convert", 3, None)
    assert file.getvalue().splitlines() == ["fetch: 49.0 MB of 98.1 MB (50 %)", "convert: 3"]


def test_failed_requests_are_counted_in_the_line(clock: VirtualClock) -> None:
    progress, file = piped(clock)
    progress.requests(2, 2, 0, 2)
    progress.close()
    assert file.getvalue() == "requests: 2/2, 0 tokens, 2 failed\n"


def test_run_of_nothing_prints_nothing(clock: VirtualClock) -> None:
    progress, file = piped(clock)
    with progress:
        pass
    progress.close()
    progress.requests(1, 1, 1)
    progress.phase("late", 1, 1)
    assert file.getvalue() == ""


def test_terminal_shows_bars_that_fit_80_columns_and_gives_the_cursor_back(clock: VirtualClock) -> None:
    file = Terminal()
    console = Console(file=file, force_terminal=True, width=80)
    with RichProgress(console, clock) as progress:
        progress.phase("fetch SmolLM2-135M-Instruct [x]", 9_000_000, 98_100_000, "bytes")
        clock.advance(1.0)
        progress.phase("fetch SmolLM2-135M-Instruct [x]", 98_100_000, 98_100_000, "bytes")
        progress.requests(3, 32, 120)
        clock.advance(1.0)
        progress.requests(32, 32, 1280, 1)
    shown = visible(file.getvalue())
    assert "fetch SmolLM2-135M-Instruct [x]: 98.1 MB in 1.00 s" in shown
    assert "32/32, 1,280 tokens, 1,280 tokens/s, 1 failed" in shown
    assert all(len(line) <= 80 for line in re.split(r"[\r\n]", shown))
    assert file.getvalue().rstrip().endswith("\x1b[?25h")


def test_dumb_terminal_gets_lines(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    file = Terminal()
    with RichProgress(Console(file=file, force_terminal=True, width=80, color_system=None), clock) as progress:
        progress.requests(1, 2, 3)
    assert file.getvalue() == "requests: 1/2, 3 tokens\n"


def test_log_line_of_a_terminal_handler_goes_above_the_bars(
    clock: VirtualClock, root_handler: logging.StreamHandler[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Terminal()
    monkeypatch.setattr(sys, "stderr", file)
    root_handler.setStream(file)
    with RichProgress(Console(file=file, force_terminal=True, width=80), clock) as progress:
        progress.requests(1, 2, 3)
        logging.getLogger("dejavu.test").warning("w0 is [ready]")
        assert root_handler.stream is not file
        progress.requests(2, 2, 6)
    assert root_handler.stream is file
    assert sys.stderr is file
    lines = [line.strip() for line in re.split(r"[\r\n]+", visible(file.getvalue()))]
    assert "w0 is [ready]" in lines


def test_stream_that_goes_to_a_file_stays_the_files(
    clock: VirtualClock, root_handler: logging.StreamHandler[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, redirected = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", redirected)
    root_handler.setStream(redirected)
    with RichProgress(Console(file=terminal, force_terminal=True, width=80), clock) as progress:
        progress.requests(1, 2, 3)
        logging.getLogger("dejavu.test").warning("to the file")
    assert redirected.getvalue() == "to the file\n"
    assert "to the file" not in terminal.getvalue()


class Failing(io.StringIO):
    """A stream that cannot be written to for a reason of ``kind``."""

    def __init__(self, kind: type[OSError], *, is_terminal: bool) -> None:
        super().__init__()
        self.failure: OSError | None = kind("no space left, or no reader")
        self._is_terminal = is_terminal

    def write(self, text: str) -> int:
        if self.failure is not None:
            raise self.failure
        return super().write(text)

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("kind", [OSError, BrokenPipeError])
def test_a_stream_that_takes_nothing_costs_lines_and_no_work(
    clock: VirtualClock, kind: type[OSError], is_terminal: bool
) -> None:
    """A full disk behind standard error ended a service, and so did ``| tee`` that died of the same Ctrl-C."""
    file = Failing(kind, is_terminal=is_terminal)
    console = Console(file=file, width=80, force_terminal=is_terminal)
    with RichProgress(console, clock, line_interval_s=5.0) as progress:
        progress.phase("load w0", 30, 30)
        for ended in range(3):
            progress.requests(ended, 100, ended * 10)
            clock.advance(6.0)
        progress.note("stopping")
        file.failure = None
        progress.note("room again")
    assert "room again" in file.getvalue()
    assert "stopping" not in file.getvalue()


def test_silent_progress_takes_the_same_calls(capfd: pytest.CaptureFixture[str]) -> None:
    progress: Progress = SilentProgress()
    progress.phase("fetch", 1, 2, "bytes")
    progress.requests(1, 2, 3)
    progress.close()
    assert capfd.readouterr() == ("", "")
