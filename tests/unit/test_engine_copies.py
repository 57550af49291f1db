"""What leaves a stage, asked of fakes: copies of rows, and handoffs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from dejavu.control.ring import StepRow
from dejavu.engine.copies import Copies
from dejavu.engine.messages import KvPart, PromptRow
from dejavu.engine.outflow import Outflow
from dejavu.engine.pool_rows import PoolRows
from dejavu.ids import RowId
from dejavu.kv.chunk import StepMark
from dejavu.kv.device import CpuCopier
from dejavu.kv.layout import LayerRange
from dejavu.kv.levels import StreamingLevel
from dejavu.kv.route import RowSpan
from dejavu.kv.stream_account import StreamStalled

from harness.streamer_kit import StreamerBench, beside, numbered_pool, pool_row

A, B, C = RowId(1), RowId(2), RowId(3)
ROWS_PER_MICROBATCH = 2


class FakeStreamer:
    """Notes what it is asked for. ``kept`` are the rows whose layers it would still have."""

    def __init__(self, kept: Sequence[RowId] = (), *, stalls: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._kept, self._stalls = kept, stalls
        self.on_submit: Callable[[tuple[RowId, ...]], None] = lambda row_ids: None

    def submit(self, layer: int, keys: torch.Tensor, values: torch.Tensor, rows: Sequence[RowSpan]) -> None:
        self.calls.append(("submit", layer, tuple(rows)))

    def submit_rows(
        self,
        pool: object,
        rows: Sequence[Any],
        *,
        made_by: str,
        layers: object = None,
        mark: StepMark | None = None,
    ) -> None:
        if self._stalls:
            raise StreamStalled("the queue is full")
        self.calls.append(("submit_rows", tuple(rows), made_by, layers if mark is None else mark))
        self.on_submit(tuple(row.span.row_id for row in rows))

    def settle(self, places: frozenset[int]) -> None:
        self.calls.append(("settle", set(places)))

    def send_again(self, jobs: Sequence[Any]) -> None:
        self.calls += [("send_again", job) for job in jobs]

    def retained(self, row_id: RowId, layers: LayerRange) -> tuple[object, ...] | None:
        return ((row_id, layers),) if row_id in self._kept else None

    def set_level(self, level: StreamingLevel) -> None:
        self.calls.append(("set_level", level))

    def drain(self, timeout_s: float) -> None:
        self.calls.append(("drain", timeout_s))
        if self._stalls:
            raise StreamStalled("not in time")

    def end_pass(self) -> None:
        self.calls.append(("end_pass",))

    def abandon_pass(self) -> None:
        self.calls.append(("abandon_pass",))

    def close(self) -> None:
        self.calls.append(("close",))


class FakeDisk:
    """Notes the rows that were dropped."""

    def __init__(self) -> None:
        self.dropped: list[RowId] = []
        self.is_closed = False

    def drop(self, row_id: RowId) -> None:
        self.dropped.append(row_id)

    def close(self) -> None:
        self.is_closed = True


def prompt(row_id: RowId, microbatch: int, row_index: int, length: int) -> PromptRow:
    return PromptRow(row_id, microbatch, row_index, length, None)


def step_row(row_id: RowId, row_index: int, position: int) -> StepRow:
    return StepRow(row_id, row_index, position, 0, None)


def written_rows() -> PoolRows:
    """A has 3 positions at place 0, B has 5 at place 3."""
    rows = PoolRows(ROWS_PER_MICROBATCH)
    rows.begin([prompt(A, 0, 0, 3), prompt(B, 1, 1, 5)])
    rows.written(A, 3)
    rows.written(B, 5)
    return rows


def copies_of(
    streamer: FakeStreamer,
    disk: FakeDisk | None = None,
    rows: PoolRows | None = None,
    lost: deque[RowId] | None = None,
) -> Copies:
    """Copies of ``written_rows``."""
    rows, lost = rows or written_rows(), deque() if lost is None else lost
    return Copies(streamer, numbered_pool(), rows, lost, disk)  # type: ignore[arg-type]


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
    assert streamer.calls == [("submit_rows", (pool_row(B, 3, 1, 5), pool_row(C, 2, 1, 2)), "step", StepMark(1, 7))]


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


def test_a_row_whose_prompt_copy_was_lost_sends_all_of_it_with_its_next_step() -> None:
    streamer, lost = FakeStreamer(), deque([A, C])
    copies = copies_of(streamer, lost=lost)
    copies.step(0, 1, [step_row(A, 0, 3), step_row(B, 1, 5)])
    copies.step(0, 2, [step_row(A, 0, 4)])
    assert [rows for _, rows, _, _ in streamer.calls] == [
        (pool_row(A, 0, 4), pool_row(B, 1, 1, 5)),
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
