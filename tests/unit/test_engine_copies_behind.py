"""Copies that fall behind: nothing waits for them, and they catch up with the next step that leaves."""

from __future__ import annotations

from collections import deque

import torch

from dejavu.engine.copies import Copies
from dejavu.engine.pool_rows import PoolRows
from dejavu.ids import RowId
from dejavu.kv.device import CpuCopier

from harness.copies_kit import ROWS_PER_MICROBATCH, A, B, C, FakeStreamer, copies_of, prompt, step_row, written_rows
from harness.streamer_kit import StreamerBench, pool_row


def test_a_row_whose_prompt_copy_was_lost_sends_all_of_it_with_its_next_step() -> None:
    streamer, lost = FakeStreamer(), deque([A, C])
    copies = copies_of(streamer, lost=lost)
    copies.step(0, 1, [step_row(A, 0, 3), step_row(B, 1, 5)])
    copies.step(0, 2, [step_row(A, 0, 4)])
    assert [rows for _, rows, _, _ in streamer.calls] == [
        (pool_row(A, 0, 4), pool_row(B, 3, 1, 5)),
        (pool_row(A, 0, 1, 4),),
    ]
    assert not lost


def test_steps_that_could_not_leave_are_taken_along_by_the_next_that_does() -> None:
    """A slow holder does not stop the steps; its copy catches up."""
    streamer, lost = FakeStreamer(), deque[RowId]()
    copies = copies_of(streamer, lost=lost)
    streamer.on_submit = lost.extend
    copies.step(0, 1, [step_row(A, 0, 3)])
    copies.step(0, 2, [step_row(A, 0, 4)])
    streamer.on_submit = lambda row_ids: None
    copies.step(0, 3, [step_row(A, 0, 5)])
    copies.step(0, 4, [step_row(A, 0, 6)])
    assert [rows for _, rows, _, _ in streamer.calls] == [
        (pool_row(A, 0, 1, 3),),
        (pool_row(A, 0, 2, 3),),
        (pool_row(A, 0, 3, 3),),
        (pool_row(A, 0, 1, 6),),
    ]


def test_a_row_that_ended_while_it_was_behind_is_behind_no_more() -> None:
    streamer, rows, lost = FakeStreamer(), written_rows(), deque([A])
    copies = copies_of(streamer, rows=rows, lost=lost)
    copies.step(1, 1, [step_row(B, 1, 5)])
    copies.release([A])
    rows.begin([prompt(A, 0, 0, 2)])
    copies.step(0, 2, [step_row(A, 0, 2)])
    assert streamer.calls[-1][1] == (pool_row(A, 0, 1, 2),)


def test_a_prompt_copy_that_finds_the_queue_full_puts_its_rows_behind() -> None:
    streamer, lost = FakeStreamer(stalls=True), deque[RowId]()
    copies_of(streamer, lost=lost).layer_hook([prompt(A, 0, 0, 3), prompt(B, 1, 1, 5)])(0)
    assert list(lost) == [A, B]


def test_spans_are_copied_again_as_they_are_given_and_empty_ones_are_not() -> None:
    streamer = FakeStreamer()
    copies_of(streamer).again([(A, 1, 3), (B, 5, 5), (C, 0, 2)])
    assert streamer.calls == [("submit_rows", (pool_row(A, 0, 2, 1),), "prompt", None), ("end_pass",)]


def test_a_holder_that_takes_nothing_keeps_no_step_waiting_and_its_copy_catches_up() -> None:
    bench = StreamerBench(num_buffers=2, patience_s=0.001, timeout_s=30.0, copier=CpuCopier())
    rows, lost = PoolRows(ROWS_PER_MICROBATCH), deque[RowId]()
    bench.on_lost = lost.extend
    copies = Copies(bench.streamer, bench.pool, rows, lost, None)
    copies.begin(rows.begin([prompt(A, 0, 0, 1)]))
    rows.written(A, 1)
    copies.prompts([A])
    bench.streamer.drain(30)
    bench.receivers.is_open = False
    for position in range(1, 6):
        copies.step(0, position, [step_row(A, 0, position)])
    assert bench.errors, "two buffers cannot hold five steps"
    bench.receivers.open()
    bench.streamer.drain(30)
    copies.step(0, 6, [step_row(A, 0, 6)])
    bench.streamer.drain(30)
    assert torch.equal(bench.received(A, 7), bench.sent(0, 7))
    copies.close()
    bench.close()


def test_a_step_that_is_reported_lost_while_the_next_one_is_handed_over_is_sent_again_too() -> None:
    """A network or a side stream says so only later; what the row lacks begins before the step that was under way."""
    streamer, lost = FakeStreamer(), deque[RowId]()
    copies = copies_of(streamer, lost=lost)
    copies.step(0, 1, [step_row(A, 0, 3)])
    streamer.on_submit = lambda row_ids: lost.append(A)
    copies.step(0, 2, [step_row(A, 0, 4)])
    streamer.on_submit = lambda row_ids: None
    copies.step(0, 3, [step_row(A, 0, 5)])
    (_, (again,), _, _) = streamer.calls[-1]
    assert again.span.start <= 3
