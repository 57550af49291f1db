"""How a service is told to stop: once, again, and while its cluster fails."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

from dejavu.clock import VirtualClock
from dejavu.errors import DejavuError
from dejavu.report.progress import SilentProgress
from dejavu.workflows.impatience import impatient
from dejavu.workflows.serve import _until_told
from dejavu.workflows.serve_thread import ServiceThread

from harness.echo_service import DEADLINE_S

SIGNALS = [signal.SIGINT, signal.SIGTERM]


class Notes(SilentProgress):
    """Keeps what a person is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Told:
    """In the place of a service: it is interrupted as soon as it is waited for, and its drain does what a test says."""

    def __init__(self, drain: Callable[[], bool], failure: BaseException | None = None) -> None:
        self.service = self
        self.counts = self
        self.open = 3
        self._drain = drain
        self._failure = failure

    def wait(self) -> None:
        raise KeyboardInterrupt

    def snapshot(self) -> Told:
        return self

    def drain(self, timeout_s: float) -> bool:
        return self._drain()

    def failure(self) -> BaseException | None:
        return self._failure


def stopped(told: Told, clock: VirtualClock, notes: Notes | None = None) -> str | None:
    return _until_told(told, 30.0, notes or Notes(), clock)  # type: ignore[arg-type]


def test_a_service_that_was_drained_has_not_failed() -> None:
    notes = Notes()
    assert stopped(Told(lambda: True), VirtualClock(), notes) is None
    assert notes.notes == ["stopping: 3 open requests have 30 s to end, new ones are refused"]


def test_requests_that_did_not_end_in_time_are_told(caplog: pytest.LogCaptureFixture) -> None:
    assert stopped(Told(lambda: False), VirtualClock()) is None
    assert "not every request ended within serve.drain_timeout_s=30" in caplog.text


def test_a_cluster_that_fails_while_the_service_stops_is_told_and_is_no_good_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The exit status was 0, and the requests were said to have taken too long."""
    notes = Notes()
    assert stopped(Told(lambda: False, DejavuError("w1 died")), VirtualClock(), notes) == "w1 died"
    assert notes.notes[-1] == "the service failed while it was stopping: w1 died"
    assert "serve.drain_timeout_s" not in caplog.text


class Failing:
    """A service whose run fails."""

    def run(self) -> None:
        raise DejavuError("w1 died")

    def drain(self, timeout_s: float) -> bool:
        return False


def test_what_ended_the_thread_of_a_service_is_known_once_it_has_ended() -> None:
    with ServiceThread(Failing()) as thread:  # type: ignore[arg-type]
        assert isinstance(thread.failure(), DejavuError)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_ends_the_wait_for_open_requests(number: signal.Signals) -> None:
    before, heard = [signal.getsignal(one) for one in SIGNALS], []
    clock = VirtualClock()

    def told_again() -> bool:
        clock.advance(1.5)
        signal.raise_signal(number)
        return True

    for one in SIGNALS:
        signal.signal(one, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(KeyboardInterrupt):
            stopped(Told(told_again), clock)
        for seconds in (0.1, 5.0, 9.8):
            # The clean-up is under way.
            clock.advance(seconds)
            signal.raise_signal(number)
    finally:
        for one, handler in zip(SIGNALS, before, strict=True):
            signal.signal(one, handler)
    assert heard == []


def test_a_signal_long_after_the_one_that_ended_the_wait_is_what_it_was_before() -> None:
    former, clock, heard = signal.getsignal(signal.SIGTERM), VirtualClock(), []

    def told_again() -> bool:
        clock.advance(1.5)
        signal.raise_signal(signal.SIGTERM)
        return True

    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            stopped(Told(told_again), clock)
        clock.advance(16.0)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, former)
        signal.signal(signal.SIGINT, interrupt)
    assert heard == [signal.SIGTERM]


def test_a_signal_that_is_the_echo_of_the_first_ends_nothing() -> None:
    """Wrappers pass on a Ctrl-C that the whole terminal has got."""
    clock = VirtualClock()

    def echoed() -> bool:
        clock.advance(0.5)
        signal.raise_signal(signal.SIGINT)
        return True

    try:
        assert stopped(Told(echoed), clock) is None
    except KeyboardInterrupt:
        pytest.fail("it was taken for a second one")


def test_a_drain_on_another_thread_leaves_signals_alone() -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    seen: list[object] = []

    def drain() -> None:
        with impatient(VirtualClock()):
            seen.extend(signal.getsignal(one) for one in SIGNALS)

    thread = threading.Thread(target=drain)
    thread.start()
    thread.join(DEADLINE_S)
    assert seen == before
