"""Spans: bounded, cheap, true to the clock."""

from __future__ import annotations

import threading

import msgspec
import pytest

from dejavu.clock import VirtualClock
from dejavu.report.spans import Span, SpanRecorder


class JumpingClock(VirtualClock):
    """A clock whose wall time was set back by a minute after the first look."""

    def __init__(self) -> None:
        super().__init__(1000.0)
        self._looks = 0

    def now(self) -> float:
        self._looks += 1
        return super().now() - (60.0 if self._looks > 1 else 0.0)


def test_span_lasts_as_long_as_its_body_and_keeps_its_args() -> None:
    clock = VirtualClock(100.0)
    recorder = SpanRecorder(clock)
    with recorder.span("layer", "compute", layer=3) as args:
        clock.advance(0.25)
        args["bytes"] = 42
    assert recorder.snapshot() == [Span("layer", "compute", 100.0, 0.25, {"layer": 3, "bytes": 42})]


def test_span_whose_body_raises_is_recorded_all_the_same() -> None:
    recorder = SpanRecorder(VirtualClock())
    with pytest.raises(KeyError), recorder.span("flush", "stream"):
        raise KeyError("gone")
    assert [span.name for span in recorder.snapshot()] == ["flush"]


def test_args_may_be_called_name_and_category() -> None:
    recorder = SpanRecorder(VirtualClock())
    recorder.add("load", "load", 1.0, 2.0, name="weights", category="disk")
    assert recorder.snapshot()[0].args == {"name": "weights", "category": "disk"}


def test_spans_over_the_limit_push_out_the_oldest_and_are_counted() -> None:
    recorder = SpanRecorder(VirtualClock(), limit=3)
    for number in range(5):
        recorder.add(str(number), "wait", float(number), 1.0)
    assert [span.name for span in recorder.snapshot()] == ["2", "3", "4"]
    assert recorder.num_dropped == 2


def test_drain_gives_each_span_once() -> None:
    recorder = SpanRecorder(VirtualClock())
    recorder.add("a", "wait", 0.0, 1.0)
    assert [span.name for span in recorder.drain()] == ["a"]
    assert recorder.drain() == []
    assert len(recorder) == 0


def test_drain_beside_adding_threads_loses_no_span() -> None:
    recorder = SpanRecorder(VirtualClock())

    def add() -> None:
        for _ in range(500):
            recorder.add("a", "wait", 0.0, 1.0)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    num_drained = 0
    while any(thread.is_alive() for thread in threads):
        num_drained += len(recorder.drain())
    assert num_drained + len(recorder.drain()) == 2000


def test_times_follow_the_steady_clock_when_wall_time_is_set_back() -> None:
    clock = JumpingClock()
    recorder = SpanRecorder(clock)
    clock.advance(1.0)
    assert recorder.now() == 1001.0


def test_span_survives_the_wire() -> None:
    span = Span("step", "compute", 1.5, 0.5, {"microbatch": 1, "share": 0.5, "row": "r7"})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(span), type=Span) == span


def test_recorder_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SpanRecorder(VirtualClock(), limit=0)
