"""What every launcher knows of its processes: what runs, what has ended by itself, what is not to begin any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from dejavu.ids import WorkerName
from operators.roster import Entry, Roster

W0, W1 = WorkerName("w0"), WorkerName("w1")


class Made(Roster[str]):
    """A roster with what launchers do to it in the open; counts the ends that somebody was told of."""

    def __init__(self) -> None:
        super().__init__(Path("logs"), self._told)
        self.num_told = 0

    def begin(self, name: WorkerName, pid: int) -> Entry[str]:
        entry = self._enter(name, lambda: (f"handle {pid}", pid))
        assert entry is not None
        return entry

    def _told(self) -> None:
        self.num_told += 1


def test_an_end_that_nobody_asked_for_is_told_once_with_its_process() -> None:
    made = Made()
    entry = made.begin(W0, 7)
    assert (made.running(), made.pids(), made.pid_of(W1)) == ({W0}, {W0: 7}, None)
    made._ended(entry, -9)
    (gone,) = made.exits()
    assert (gone.name, gone.pid, gone.text, made.num_told) == (W0, 7, "killed by signal 9", 1)
    assert (made.running(), made.pid_of(W0)) == (frozenset(), 7)


def test_the_end_of_a_process_that_was_killed_is_no_failure() -> None:
    made = Made()
    entry = made.begin(W0, 7)
    assert made._take_off(W0) is entry
    assert made.running() == frozenset()
    made._ended(entry, -9)
    assert (made.exits(), made.num_told, made._take_off(W0)) == ((), 0, None)


def test_the_end_of_a_process_that_has_a_newer_one_is_no_failure_and_leaves_the_newer_one_running() -> None:
    """One launcher used to report such an end, and the other did not."""
    made = Made()
    old, new = made.begin(W0, 7), made.begin(W0, 8)
    assert made._all() == (old, new)
    made._ended(old, 1)
    assert (made.exits(), made.running(), made.pids()) == ((), {W0}, {W0: 8})
    # It need not be ended any more.
    third = made.begin(W1, 9)
    assert made._all() == (new, third)


def test_while_stopping_no_end_is_a_failure_and_nobody_is_started() -> None:
    made = Made()
    entry = made.begin(W0, 7)
    made.expect_exits()
    made._ended(entry, 0)
    assert (made.exits(), made.is_stopping()) == ((), True)
    assert made._enter(W1, lambda: pytest.fail("nobody is made")) is None


@pytest.mark.parametrize("meanwhile", ["killed", "replaced", "stopping"])
def test_a_process_that_nobody_wants_any_more_does_not_begin(meanwhile: str) -> None:
    made = Made()
    entry = made.begin(W0, -1)
    match meanwhile:
        case "killed":
            made._take_off(W0)
        case "replaced":
            made.begin(W0, -2)
        case "stopping":
            made.expect_exits()
    assert not made._is_wanted(entry)
    assert not made._begun(entry, 7)
    assert entry.pid == -1


def test_a_process_that_has_begun_is_known_by_its_pid() -> None:
    made = Made()
    entry = made.begin(W0, -1)
    assert made.pids() == {W0: -1}
    assert made._begun(entry, 7)
    assert made.pids() == {W0: 7}


def test_who_is_sought_and_not_there_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    made = Made()
    assert made._find(W0, "sent signal 15") is None
    assert "worker w0 has no process here to be sent signal 15" in caplog.text
