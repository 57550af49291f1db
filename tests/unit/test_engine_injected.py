"""Faults that are brought about in a worker: slow, and cut off for a while without losing a message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from dejavu.engine import injected
from dejavu.engine import messages as m
from dejavu.engine.injected import InjectedFaults
from dejavu.engine.mailbox import Mailbox
from dejavu.engine.peers import Peers
from dejavu.ids import Epoch, RowId
from dejavu.transport.base import Hello, Inbound, TransportError

EPOCH = Epoch(1)
HELLO = Hello(cluster="c", name="w1", incarnation="i", epoch=1)


class Switch:
    """A view, a lease's keeper and who is slowed in one: what they were told last."""

    def __init__(self) -> None:
        self.is_blind: bool | None = None
        self.is_cut: bool | None = None
        self.slow_s = 0.0

    def be_blind(self, is_blind: bool) -> None:
        self.is_blind = is_blind

    def cut(self, is_cut: bool) -> None:
        self.is_cut = is_cut


class FakeTimer:
    """A timer that fires when the test says."""

    def __init__(self, delay_s: float, act: Callable[..., None], args: Sequence[Any]) -> None:
        self.delay_s, self.daemon, self.is_cancelled = delay_s, False, False
        self._act, self._args = act, args

    def start(self) -> None:
        pass

    def cancel(self) -> None:
        self.is_cancelled = True

    def fire(self) -> None:
        self._act(*self._args)


class FakeLink:
    """Notes what it is given; each send fails when ``failure`` is set."""

    description = "fake"

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.failure: TransportError | None = None

    def send(self, header: bytes, payload: Sequence[memoryview] = (), *, timeout_s: float = 1.0) -> Future[None]:
        self.sent.append(header)
        future: Future[None] = Future()
        if self.failure is None:
            future.set_result(None)
        else:
            future.set_exception(self.failure)
        return future

    def connect(self, address: str, hello: Hello, *, peer: str, timeout_s: float) -> FakeLink:
        return self


class Stand:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timers: list[FakeTimer] = []
        monkeypatch.setattr(injected.threading, "Timer", self._timer)
        self.mailbox = Mailbox(cluster="c", epoch=lambda: EPOCH, fingerprint=lambda: "")
        self.switch, self.link = Switch(), FakeLink()
        self.failures: list[str] = []
        self.faults = InjectedFaults(self.mailbox, self.switch, self.switch)  # type: ignore[arg-type]
        self.peers = self.new_peers()

    def new_peers(self) -> Peers:
        peers = Peers(
            self.link,  # type: ignore[arg-type]
            HELLO,
            timeout_s=1.0,
            on_failed=lambda peer, reason, epoch: self.failures.append(peer),
        )
        peers.connect("w2", "127.0.0.1:1", timeout_s=1.0)
        self.faults.cuts(peers)
        return peers

    def arrive(self, row_id: int) -> None:
        header = m.encode(m.RowsEnded(epoch=EPOCH, row_ids=(RowId(row_id),)))
        self.mailbox.received(Inbound(hello=HELLO, header=header, payload=memoryview(b""), release=lambda: None))

    def came(self) -> list[int]:
        rows = []
        while (event := self.mailbox.take(0.0)) is not None:
            rows += event.message.row_ids  # type: ignore[union-attr]
        return rows

    def _timer(self, delay_s: float, act: Callable[..., None], args: Sequence[Any]) -> FakeTimer:
        self.timers.append(FakeTimer(delay_s, act, args))
        return self.timers[-1]


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(monkeypatch)


def test_a_worker_that_is_cut_off_holds_everything_back_and_then_it_goes_on_its_way_in_order(stand: Stand) -> None:
    stand.faults.obey(b'{"partition_s": 5.0}')
    assert (stand.switch.is_blind, stand.switch.is_cut) == (True, True)
    sent = [stand.peers.send("w2", header) for header in (b"1", b"2")]
    stand.arrive(1)
    stand.arrive(2)
    assert (stand.link.sent, stand.came(), any(one.done() for one in sent)) == ([], [], False)
    (timer,) = stand.timers
    assert (timer.delay_s, timer.daemon) == (5.0, True)
    timer.fire()
    assert (stand.switch.is_blind, stand.switch.is_cut) == (False, False)
    assert (stand.link.sent, stand.came()) == ([b"1", b"2"], [1, 2])
    assert [one.result(0) for one in sent] == [None, None]


def test_what_was_held_back_and_cannot_be_sent_any_more_fails_and_is_reported(stand: Stand) -> None:
    stand.faults.obey(b'{"partition_s": 5.0}')
    told = stand.peers.tell("w2", m.Stop(epoch=EPOCH))
    stand.link.failure = TransportError("gone", peer="w2", phase="send")
    stand.timers[0].fire()
    assert isinstance(told.exception(0), TransportError)
    assert stand.failures == ["w2"]


def test_links_of_a_new_epoch_are_cut_as_well_while_it_lasts(stand: Stand) -> None:
    stand.faults.obey(b'{"partition_s": 5.0}')
    later = stand.new_peers()
    later.send("w2", b"1")
    assert stand.link.sent == []
    stand.timers[0].fire()
    assert stand.link.sent == [b"1"]


def test_a_worker_that_ends_while_it_is_cut_off_holds_nothing_back(stand: Stand) -> None:
    stand.faults.obey(b'{"partition_s": 5.0}')
    stand.peers.send("w2", b"1")
    stand.faults.close()
    assert (stand.timers[0].is_cancelled, stand.link.sent, stand.switch.is_cut) == (True, [b"1"], False)


def test_slowness_is_taken_on_by_whoever_is_made_slow_before_or_afterwards(stand: Stand) -> None:
    stand.faults.obey(b'{"slow_s": 0.25}')
    stand.faults.slows(stand.switch)
    assert stand.switch.slow_s == 0.25
    stand.faults.obey(b'{"slow_s": 0}')
    assert stand.switch.slow_s == 0.0


@pytest.mark.parametrize("line", [b"", b"kill w1\n", b'{"slow_s": "much"}'])
def test_a_line_that_is_no_fault_is_logged_and_changes_nothing(
    stand: Stand, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    stand.faults.obey(line)
    assert "is no fault" in caplog.text
    assert (stand.switch.is_blind, stand.switch.slow_s, stand.timers) == (None, 0.0, [])


def test_a_mailbox_forgets_what_was_posted_in_an_epoch_that_is_over() -> None:
    epoch = [Epoch(1)]
    box = Mailbox(cluster="c", epoch=lambda: epoch[0], fingerprint=lambda: "")
    released = []
    header = m.encode(m.RowsEnded(epoch=EPOCH, row_ids=()))
    box.received(Inbound(hello=HELLO, header=header, payload=memoryview(b""), release=lambda: released.append(True)))
    box.lost(HELLO, "reset")
    epoch[0] = Epoch(2)
    assert box.take(0.0) is None
    assert (released, box.num_stale) == ([True], 1)
