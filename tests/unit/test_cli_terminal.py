"""Signals, log records and completion as a person at a terminal meets them."""

from __future__ import annotations

import logging
import signal
import sys

import pytest

from dejavu.cli.completion import bash_script, check_request
from dejavu.cli.interruption import GRACE_S, Interruption
from dejavu.cli.job import ExitCode
from dejavu.cli.terminal import TOLD, TerseFormatter, Untold
from dejavu.clock import VirtualClock
from dejavu.errors import ConfigError


def record_of_a_failure() -> logging.LogRecord:
    try:
        raise ValueError("boom")
    except ValueError:
        return logging.LogRecord("x", logging.ERROR, "file.py", 1, "it failed", (), sys.exc_info())


def test_the_terminal_shows_no_traceback_and_the_file_keeps_it() -> None:
    record = record_of_a_failure()
    assert TerseFormatter().format(record) == "ERROR: it failed"
    assert "Traceback" in logging.Formatter("%(message)s").format(record)
    assert TerseFormatter().format(record) == "ERROR: it failed"


def test_a_record_that_was_told_is_not_shown_again() -> None:
    record = record_of_a_failure()
    assert Untold().filter(record)
    setattr(record, TOLD, True)
    assert not Untold().filter(record)


def test_the_first_signal_interrupts_and_those_after_it_do_not(capfd: pytest.CaptureFixture[str]) -> None:
    clock = VirtualClock(100.0)
    interruption = Interruption(clock)
    assert not interruption.happened
    with pytest.raises(KeyboardInterrupt):
        interruption.receive(signal.SIGINT, None)
    assert interruption.happened
    clock.advance(GRACE_S)
    interruption.receive(signal.SIGTERM, None)
    interruption.receive(signal.SIGINT, None)


def test_a_signal_after_the_grace_interrupts_again() -> None:
    clock = VirtualClock()
    interruption = Interruption(clock)
    with pytest.raises(KeyboardInterrupt):
        interruption.receive(signal.SIGTERM, None)
    clock.advance(GRACE_S + 1)
    with pytest.raises(KeyboardInterrupt):
        interruption.receive(signal.SIGINT, None)


def test_a_sweeps_worst_job_decides() -> None:
    worst_last = [ExitCode.DONE, ExitCode.WRONG_CONFIG, ExitCode.INFEASIBLE, ExitCode.FAILED, ExitCode.INTERRUPTED]
    for index, code in enumerate(worst_last):
        assert max(worst_last[: index + 1], key=ExitCode.severity) is code


def test_bash_gets_a_script_of_ours_and_other_shells_that_of_hydra() -> None:
    assert "-m dejavu.run" in (bash_script(["install=bash"]) or "")
    assert bash_script(["install=zsh"]) is None


@pytest.mark.parametrize("overrides", [[], ["install"], ["install=csh"], ["instal=bash"], ["query=bash"]])
def test_a_completion_request_that_makes_no_sense_is_refused(overrides: list[str]) -> None:
    with pytest.raises(ConfigError):
        check_request(overrides, {})
