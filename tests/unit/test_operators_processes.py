"""Worker processes: their ends are seen, asked-for ends are no failures, none is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dejavu.ids import WorkerName
from operators.processes import ProcessLauncher

pytestmark = pytest.mark.slow

W0 = WorkerName("w0")


@pytest.fixture
def ended() -> threading.Event:
    return threading.Event()


@pytest.fixture
def launcher(tmp_path: Path, ended: threading.Event, nothing_left: None) -> Iterator[ProcessLauncher]:
    made = ProcessLauncher(lambda name: b"no spec", tmp_path / "logs", num_threads=1, on_exit=ended.set)
    yield made
    made.stop()


def test_a_worker_that_cannot_read_its_spec_ends_and_is_reported(
    launcher: ProcessLauncher, ended: threading.Event
) -> None:
    launcher.start(W0)
    assert ended.wait(60.0)
    (gone,) = launcher.exits()
    assert (gone.name, gone.status, gone.pid) == (W0, 1, launcher.pid_of(W0))
    assert launcher.running() == frozenset()
    assert launcher.log_of(W0).read_text()


def test_an_end_that_was_asked_for_is_no_failure(launcher: ProcessLauncher, ended: threading.Event) -> None:
    launcher.start(W0)
    assert launcher.running() == {W0}
    launcher.stop()
    launcher.stop()
    assert launcher.exits() == ()
    assert not ended.is_set()


ECHO = (sys.executable, "-u", "-c", "import sys\nfor line in sys.stdin: print(line, end='')")
"""A worker that logs each line that it is told."""


@pytest.fixture
def echoing(tmp_path: Path, ended: threading.Event, nothing_left: None) -> Iterator[ProcessLauncher]:
    made = ProcessLauncher(lambda name: b"its spec", tmp_path / "logs", num_threads=1, on_exit=ended.set, command=ECHO)
    yield made
    made.stop()


def wait_logged(launcher: ProcessLauncher, text: str) -> None:
    """The worker has logged the text; fails after a minute."""
    deadline_s = time.monotonic() + 60.0
    while text not in launcher.log_of(W0).read_text():
        assert time.monotonic() < deadline_s, launcher.log_of(W0).read_text()
        time.sleep(0.01)


def test_a_worker_is_told_further_lines_after_its_spec(echoing: ProcessLauncher) -> None:
    echoing.start(W0)
    echoing.tell(W0, b"another line")
    wait_logged(echoing, "its spec\nanother line\n")


def test_a_worker_that_is_killed_on_purpose_has_no_exit_and_does_not_run(
    echoing: ProcessLauncher, ended: threading.Event
) -> None:
    """Also one that is frozen: it would have taken no other signal."""
    echoing.start(W0)
    pid = echoing.pid_of(W0)
    assert pid is not None
    echoing.signal(W0, signal.SIGSTOP)
    echoing.kill(W0)
    assert echoing.running() == frozenset()
    echoing.start(W0)
    assert echoing.running() == {W0}
    assert echoing.pid_of(W0) != pid
    echoing.signal(W0, signal.SIGKILL)
    assert ended.wait(60.0)
    (gone,) = echoing.exits()
    assert (gone.status, gone.pid) == (-signal.SIGKILL, echoing.pid_of(W0))


def test_an_end_by_a_signal_is_reported_with_its_process_and_its_time(
    echoing: ProcessLauncher, ended: threading.Event
) -> None:
    before_s = time.time()
    echoing.start(W0)
    echoing.signal(W0, signal.SIGKILL)
    assert ended.wait(60.0)
    (gone,) = echoing.exits()
    assert (gone.text, gone.pid) == ("killed by signal 9", echoing.pid_of(W0))
    assert before_s <= gone.at_s <= time.time()
    # Nobody hears these.
    echoing.signal(W0, signal.SIGTERM)
    echoing.tell(W0, b"too late")
    echoing.kill(W0)


def test_a_worker_that_is_started_again_appends_to_its_log(echoing: ProcessLauncher, ended: threading.Event) -> None:
    echoing.start(W0)
    wait_logged(echoing, "its spec\n")
    echoing.signal(W0, signal.SIGKILL)
    assert ended.wait(60.0)
    echoing.start(W0)
    wait_logged(echoing, "its spec\nits spec\n")


def test_a_process_that_has_a_newer_one_is_not_left_behind(echoing: ProcessLauncher) -> None:
    """The operator kills the old one first; should it not have, the end of the run does."""
    echoing.start(W0)
    old = echoing.pid_of(W0)
    assert old is not None
    echoing.start(W0)
    echoing.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(old, 0)
