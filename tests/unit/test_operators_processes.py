"""Worker processes: their ends are seen, asked-for ends are no failures, none is left."""

from __future__ import annotations

import threading
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
    assert (gone.name, gone.status) == (W0, 1)
    assert launcher.running() == frozenset()
    assert launcher.log_of(W0).read_text()


def test_an_end_that_was_asked_for_is_no_failure(launcher: ProcessLauncher, ended: threading.Event) -> None:
    launcher.start(W0)
    assert launcher.running() == {W0}
    launcher.stop()
    launcher.stop()
    assert launcher.exits() == ()
    assert not ended.is_set()


def test_a_launcher_that_stops_starts_nobody(launcher: ProcessLauncher) -> None:
    """A worker that ended cleanly at the end of a run used to be started again by the operator's next pass."""
    launcher.expect_exits()
    launcher.start(W0)
    assert launcher.running() == frozenset()
