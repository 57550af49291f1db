"""Steps that leave together: fewer messages, the newest step's mark, and nothing kept back for long."""

from __future__ import annotations

from dejavu.clock import VirtualClock
from dejavu.kv.chunk import StepMark

from harness.copies_kit import A, B, FakeStreamer, copies_of, step_row, written_rows
from harness.streamer_kit import pool_row


def test_steps_of_one_microbatch_leave_together_under_the_mark_of_the_newest() -> None:
    streamer = FakeStreamer()
    copies = copies_of(streamer, copy_steps=3, clock=VirtualClock())
    for step in range(7):
        copies.step(0, 10 + step, [step_row(A, 0, 3 + step)])
    assert streamer.calls == [
        ("submit_rows", (pool_row(A, 0, 3, 3),), "step", StepMark(0, 12)),
        ("submit_rows", (pool_row(A, 0, 3, 6),), "step", StepMark(0, 15)),
    ]


def test_steps_of_other_rows_do_not_wait_for_each_other() -> None:
    streamer = FakeStreamer()
    copies = copies_of(streamer, copy_steps=3, clock=VirtualClock())
    copies.step(0, 1, [step_row(A, 0, 3)])
    copies.step(1, 1, [step_row(B, 1, 5)])
    copies.step(0, 2, [step_row(A, 0, 4), step_row(B, 1, 6)])
    assert streamer.calls == [("submit_rows", (pool_row(A, 0, 1, 3),), "step", StepMark(0, 1))]


def test_slow_steps_leave_by_themselves() -> None:
    streamer, clock = FakeStreamer(), VirtualClock()
    copies = copies_of(streamer, copy_steps=4, clock=clock)
    copies.step(0, 1, [step_row(A, 0, 3)])
    clock.advance(1.0)
    copies.step(0, 2, [step_row(A, 0, 4)])
    assert streamer.calls == [("submit_rows", (pool_row(A, 0, 2, 3),), "step", StepMark(0, 2))]


def test_a_row_that_has_ended_is_left_out_of_what_still_waited() -> None:
    streamer, rows = FakeStreamer(), written_rows()
    copies = copies_of(streamer, rows=rows, copy_steps=4, clock=VirtualClock())
    copies.step(0, 1, [step_row(A, 0, 3), step_row(B, 1, 5)])
    rows.release([A])
    copies.flush()
    assert streamer.calls == [("submit_rows", (pool_row(B, 3, 1, 5),), "step", StepMark(0, 1))]
    copies.flush()
    assert len(streamer.calls) == 1
