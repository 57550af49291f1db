"""A streamer and memory: places that may be written to again, what waits at most, and layers kept to be sent again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dejavu.ids import RowId
from dejavu.kv.jobs import LayerJob
from dejavu.kv.layout import LayerRange
from dejavu.kv.levels import StreamingLevel
from dejavu.kv.retained import RetainedLayers
from dejavu.kv.route import RowSpan
from dejavu.kv.stream_setup import PoolRow

from harness.streamer_kit import LAYERS, POSITION_BYTES, StreamerBench, beside, pool_row

A, B, C = RowId(1), RowId(2), RowId(3)
LAYER_BYTES = 2 * 5 * POSITION_BYTES // len(LAYERS)
"""K and V of one layer of two rows, padded to five positions."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def held_up(bench: StreamerBench, *queued: PoolRow) -> None:
    """Both staging buffers are on their way with row B, and the thread has a job of row A at place 0 in its hand."""
    bench.receivers.is_open = False
    bench.step(pool_row(B, 2, 1))
    bench.receivers.await_letters(2)
    bench.step(pool_row(A, 0, 1))
    # The queue takes one job, so this returns only when the job before was taken out of it.
    bench.step(*queued)


@pytest.fixture
def tight() -> Iterator[StreamerBench]:
    """Staging for one step, one for each owner, and one job in the queue."""
    bench = StreamerBench(num_buffers=2, max_queued_jobs=1)
    yield bench
    bench.close()


def test_settle_waits_for_a_gather_under_way_and_the_place_may_then_be_overwritten(tight: StreamerBench) -> None:
    held_up(tight, pool_row(B, 2, 1, 1))
    before, log = tight.sent(0, 1).clone(), []

    def write_again() -> None:
        tight.streamer.settle(frozenset({0}))
        log.append("settled")
        tight.pool.cells_LCRHSD[:, :, 0] = -1.0

    with beside(write_again):
        log.append("answered")
        tight.receivers.open()
    tight.streamer.drain(30)
    assert log == ["answered", "settled"]
    assert torch.equal(tight.received(A, 1), before)
    assert torch.equal(tight.received(B, 2), tight.sent(2, 2))


def test_settle_drops_what_is_queued_of_that_place_and_nothing_else(tight: StreamerBench) -> None:
    held_up(tight, pool_row(B, 2, 1, 1), pool_row(C, 3, 1))
    tight.streamer.settle(frozenset({3}))
    tight.pool.cells_LCRHSD[:, :, 3] = -1.0
    tight.receivers.open()
    tight.streamer.drain(30)
    assert torch.equal(tight.received(A, 1), tight.sent(0, 1))
    assert torch.equal(tight.received(B, 2), tight.sent(2, 2))
    assert C not in {chunk.row_id for chunk in tight.receivers.chunks}
    assert tight.errors == []


def test_a_job_of_which_nothing_is_left_ends_quietly(tight: StreamerBench) -> None:
    held_up(tight, pool_row(C, 3, 1))
    tight.streamer.settle(frozenset({3}))
    tight.receivers.open()
    tight.streamer.drain(30)
    assert {chunk.row_id for chunk in tight.receivers.chunks} == {A, B}
    assert (tight.errors, tight.streamer.counters.failed_jobs) == ([], 0)


def test_settle_does_not_wait_for_other_places_nor_for_the_network(tight: StreamerBench) -> None:
    held_up(tight, pool_row(B, 2, 1, 1))
    tight.streamer.settle(frozenset({1, 2, 3}))
    assert not tight.receivers.futures[0].done()


@pytest.mark.parametrize("level", [StreamingLevel.naive, StreamingLevel.buffered], ids=lambda level: level.value)
def test_where_steps_are_awaited_nothing_is_left_to_settle(level: StreamingLevel) -> None:
    bench = StreamerBench(level)
    bench.step(pool_row(A, 0, 1))
    bench.streamer.settle(frozenset({0}))
    bench.close()
    assert bench.streamer.counters.exposed_s == 0


def test_a_slow_network_blocks_steps_and_bounds_what_waits() -> None:
    bench = StreamerBench(num_buffers=2, max_queued_jobs=2)
    bench.receivers.is_open = False
    submitted: list[int] = []

    def compute() -> None:
        for position in range(8):
            bench.step(pool_row(A, 0, 1, position))
            submitted.append(position)

    with beside(compute):
        bench.receivers.await_letters(2)
        # Both buffers carry the first step, one to each owner; one step is in the thread's hand, two are queued.
        assert len(submitted) <= 4
        assert bench.staging.num_out == 2
        bench.receivers.open()
    bench.close()
    assert torch.equal(bench.received(A, 8), bench.sent(0, 8))
    assert [chunk.positions[0] for chunk in bench.receivers.chunks] == [p for p in range(8) for _ in ("t0", "t1")]


def two_prompts(bench: StreamerBench) -> None:
    bench.prompt_layers(pool_row(A, 0, 3), pool_row(B, 2, 5))
    bench.streamer.end_pass()
    bench.streamer.drain(30)


@pytest.mark.parametrize("level", list(StreamingLevel)[1:], ids=lambda level: level.value)
def test_kept_layers_are_sent_again_in_the_background_at_every_level(level: StreamingLevel) -> None:
    bench = StreamerBench(level, retain_bytes=1 << 20)
    two_prompts(bench)
    jobs = bench.streamer.retained(B, LAYERS)
    assert jobs is not None
    assert [(job.layer, job.rows) for job in jobs] == [(i, (RowSpan(row_id=B, length=5),)) for i in LAYERS.indices]
    num_letters = len(bench.receivers.letters)
    bench.receivers.await_letters(num_letters)
    bench.receivers.is_open = False
    bench.streamer.send_again(jobs)
    bench.receivers.await_letters(len(LAYERS))
    again = bench.receivers.letters[num_letters:]
    assert [[chunk.row_id for chunk in message.chunks] for _, message in again] == [[B]] * len(LAYERS)
    bench.close()
    assert bench.streamer.counters.sent_again == len(LAYERS)
    assert bench.receivers.counters("t0").duplicate == 2
    assert torch.equal(bench.received(B, 5), bench.sent(2, 5))


def test_layers_are_not_found_for_another_row_for_layers_not_sent_nor_when_nothing_is_kept() -> None:
    bench, forgetful = StreamerBench(retain_bytes=1 << 20), StreamerBench()
    for one in (bench, forgetful):
        two_prompts(one)
    assert bench.streamer.retained(C, LAYERS) is None
    assert bench.streamer.retained(A, LayerRange(0, 4)) is None
    assert bench.streamer.retained(A, LayerRange(1, 2)) is not None
    assert forgetful.streamer.retained(A, LayerRange(1, 2)) is None
    forgetful.close()
    bench.close()


def test_the_newest_layers_are_kept_up_to_the_limit() -> None:
    bench = StreamerBench(retain_bytes=2 * LAYER_BYTES)
    two_prompts(bench)
    assert bench.streamer.retained(A, LAYERS) is None
    assert bench.streamer.retained(A, LayerRange(1, 3)) is not None
    bench.prompt_layers(pool_row(C, 1, 5), pool_row(RowId(4), 3, 5))
    bench.close()
    assert bench.streamer.retained(A, LayerRange(2, 3)) is None
    assert bench.streamer.retained(C, LayerRange(1, 3)) is not None


def layer_job(layer: int, row_id: RowId = A, num_rows: int = 1) -> LayerJob:
    cells = torch.zeros(num_rows, 2, 4, 2)
    rows = tuple(RowSpan(row_id=RowId(row_id + index), length=4) for index in range(num_rows))
    return LayerJob(layer=layer, keys_BHTD=cells, values_BHTD=cells.clone(), rows=rows, after=None)


def test_a_layer_larger_than_the_limit_is_not_kept_and_neither_is_one_before_it() -> None:
    kept = RetainedLayers(layer_job(0).nbytes)
    kept.keep([layer_job(0), layer_job(1, num_rows=2)])
    assert kept.find(A, LayerRange(0, 1)) is None
    assert kept.find(A, LayerRange(1, 2)) is None


def test_memory_that_keys_and_values_share_counts_once() -> None:
    both = torch.zeros(1, 4, 4, 2)
    rows = (RowSpan(row_id=A, length=4),)
    job = LayerJob(layer=0, keys_BHTD=both[:, :2], values_BHTD=both[:, 2:], rows=rows, after=None)
    assert job.nbytes == both.nbytes
    kept = RetainedLayers(both.nbytes)
    kept.keep([job])
    assert kept.find(A, LayerRange(0, 1)) is not None


def test_a_layer_that_was_sent_again_displaces_no_other() -> None:
    kept = RetainedLayers(2 * layer_job(0).nbytes)
    kept.keep([layer_job(0), layer_job(1)])
    again = kept.find(A, LayerRange(1, 2))
    assert again is not None
    kept.keep(again)
    assert kept.find(A, LayerRange(0, 1)) is not None
