"""What leaves a stage, asked of fakes: copies of rows, and handoffs."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from dejavu.engine.copies import Copies
from dejavu.engine.messages import KvPart
from dejavu.engine.outflow import Outflow
from dejavu.engine.pool_rows import PoolRows
from dejavu.ids import RowId
from dejavu.kv.chunk import StepMark
from dejavu.kv.layout import LayerRange
from dejavu.kv.levels import StreamingLevel
from dejavu.kv.route import RowSpan

from harness.copies_kit import (
    ROWS_PER_MICROBATCH,
    A,
    B,
    C,
    FakeDisk,
    FakeStreamer,
    copies_of,
    prompt,
    step_row,
    written_rows,
)
from harness.streamer_kit import StreamerBench, beside, pool_row


def part(row_id: RowId, start: int, stop: int) -> KvPart:
    return KvPart(row_id, LayerRange(1, 2), (start, stop))


def test_begin_settles_the_places_and_the_rows_that_were_there_leave_no_more() -> None:
    streamer, rows_here = FakeStreamer(), written_rows()
    copies = copies_of(streamer, rows=rows_here)
    copies.begin(rows_here.begin([prompt(C, 0, 0, 2)]))
    rows_here.written(C, 2)
    assert streamer.calls == [("settle", {0})]
    streamer.calls.clear()
    copies.send_again([part(A, 0, 1)])
    assert streamer.calls == []
    copies.prompts([A, B, C])
    (_, rows, _, _), _ = streamer.calls
    assert rows == (pool_row(B, 3, 5), pool_row(C, 0, 2))


def test_a_prompt_layer_that_is_in_the_pool_leaves_with_each_rows_own_length() -> None:
    streamer = FakeStreamer()
    hook = copies_of(streamer).layer_hook([prompt(A, 0, 0, 3), prompt(B, 1, 1, 5)])
    assert streamer.calls == []
    hook(2)
    assert streamer.calls == [("submit_rows", (pool_row(A, 0, 3), pool_row(B, 3, 5)), "prompt", LayerRange(2, 3))]


def test_whole_prompts_leave_in_all_layers_as_a_pass_of_their_own() -> None:
    streamer = FakeStreamer()
    copies_of(streamer).prompts([B])
    assert streamer.calls == [("submit_rows", (pool_row(B, 3, 5),), "prompt", None), ("end_pass",)]


def test_prompts_of_rows_that_are_not_known_submit_nothing() -> None:
    streamer = FakeStreamer()
    copies_of(streamer).prompts([C])
    assert streamer.calls == [("end_pass",)]


def test_a_step_sends_one_position_of_each_of_its_rows() -> None:
    streamer = FakeStreamer()
    copies_of(streamer).step(1, 7, [step_row(B, 1, 5), step_row(C, 0, 2)])
    # C has ended: nobody needs its copy.
    assert streamer.calls == [("submit_rows", (pool_row(B, 3, 1, 5),), "step", StepMark(1, 7))]


def test_a_part_of_what_is_written_is_sent_again_from_its_place() -> None:
    streamer, rows = FakeStreamer(), written_rows()
    copies = copies_of(streamer, rows=rows)
    rows.written(B, 6)
    copies.send_again([part(A, 1, 3), part(B, 5, 6)])
    jobs = [job for _, job in streamer.calls]
    assert [(job.rows, job.layers) for job in jobs] == [
        ((pool_row(A, 0, 2, 1),), LayerRange(1, 2)),
        ((pool_row(B, 3, 1, 5),), LayerRange(1, 2)),
    ]


def test_positions_beyond_what_is_written_and_unknown_rows_are_not_sent_again() -> None:
    streamer = FakeStreamer()
    copies_of(streamer).send_again([part(A, 2, 4), part(C, 0, 1)])
    assert streamer.calls == []


@pytest.mark.parametrize("span", [(2, 2), (3, 1), (-1, 2)])
def test_positions_that_only_a_corrupt_header_can_name_are_not_sent_again(span: tuple[int, int]) -> None:
    streamer = FakeStreamer()
    copies_of(streamer).send_again([part(A, *span)])
    assert streamer.calls == []


def test_a_released_row_is_dropped_on_disk_and_not_sent_again() -> None:
    streamer, disk, rows = FakeStreamer(), FakeDisk(), written_rows()
    copies = copies_of(streamer, disk, rows)
    copies.release([A, C])
    rows.release([A, C])
    copies.send_again([part(A, 0, 1)])
    assert (disk.dropped, streamer.calls) == ([A, C], [])
    copies.close()
    assert (disk.is_closed, streamer.calls) == (True, [("close",)])


def test_an_outflow_without_parts_does_nothing() -> None:
    out = Outflow()
    rows = [prompt(A, 0, 0, 3)]
    assert (out.streamers, out.on_layer(rows), out.on_written(rows)) == ((), None, None)
    out.begin(frozenset({0}))
    out.step(0, 1, [step_row(A, 0, 3)])
    out.again([(A, 0, 3)])
    out.prompts([A])
    out.release([A])
    out.set_level(StreamingLevel.naive)
    assert out.send_again([part(A, 0, 1)]) == ()
    for end in (out.end_pass, out.abandon_pass, out.close):
        end()


def test_a_handoff_hands_each_layer_over_with_its_rows() -> None:
    handoff = FakeStreamer()
    out = Outflow(handoff=handoff)  # type: ignore[arg-type]
    on_layer = out.on_layer([prompt(A, 0, 0, 3), prompt(B, 1, 1, 5)])
    assert on_layer is not None
    on_layer(2, torch.zeros(0), torch.zeros(0))
    assert handoff.calls == [("submit", 2, (RowSpan(row_id=A, length=3), RowSpan(row_id=B, length=5)))]


def test_a_handoff_sends_again_what_it_kept_and_names_the_rows_that_are_gone() -> None:
    handoff = FakeStreamer(kept=[A])
    out = Outflow(handoff=handoff)  # type: ignore[arg-type]
    assert out.send_again([part(A, 0, 1), part(B, 0, 1)]) == (B,)
    assert handoff.calls == [("send_again", (A, LayerRange(1, 2)))]


def test_an_outflow_asks_every_streamer_and_a_drain_that_takes_too_long_is_let_be() -> None:
    handoff, copying = FakeStreamer(stalls=True), FakeStreamer(stalls=True)
    out = Outflow(handoff=handoff, copies=copies_of(copying))  # type: ignore[arg-type]
    out.set_level(StreamingLevel.naive)
    out.end_pass()
    out.abandon_pass()
    out.drain(1.5)
    out.close()
    assert out.streamers == (handoff, copying)
    assert (
        handoff.calls
        == copying.calls
        == [("set_level", StreamingLevel.naive), ("end_pass",), ("abandon_pass",), ("drain", 1.5), ("close",)]
    )


def test_a_place_that_is_given_to_another_row_gets_no_old_cells_into_a_copy_and_the_other_way_round() -> None:
    bench, rows = StreamerBench(), PoolRows(ROWS_PER_MICROBATCH)
    copies = Copies(bench.streamer, bench.pool, rows, deque(), None)
    copies.begin(rows.begin([prompt(A, 0, 0, 3)]))
    rows.written(A, 3)
    copies.prompts([A])
    bench.streamer.drain(30)
    bench.receivers.is_open = False
    for position in range(3, 6):
        copies.step(0, position, [step_row(A, 0, position)])
    old = bench.sent(0, 6).clone()
    with beside(bench.receivers.open):
        copies.begin(rows.begin([prompt(B, 0, 0, 4)]))
    bench.pool.cells_LCRHSD[:, :, 0] *= -1
    rows.written(B, 4)
    copies.prompts([B])
    bench.streamer.drain(30)
    here = min(store.length(A) for store in bench.receivers.stores.values())
    assert here >= 3
    assert torch.equal(bench.received(A, here), old[..., :here, :])
    assert torch.equal(bench.received(B, 4), -old[..., :4, :])
    copies.close()
    bench.close()
