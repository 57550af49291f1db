"""Where the computing thread gathers a step itself: nothing is awaited, and the cells may be written to again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dejavu.ids import RowId
from dejavu.kv.device import CpuCopier
from dejavu.kv.staging import StagingTimeout

from harness.streamer_kit import POSITION_BYTES, StreamerBench, pool_row

A, B = RowId(1), RowId(2)
STEP = (pool_row(A, 0, 1), pool_row(B, 2, 1))


@pytest.fixture
def bench() -> Iterator[StreamerBench]:
    torch.set_num_threads(1)
    made = StreamerBench(copier=CpuCopier())
    yield made
    made.close()


def test_a_step_has_been_handed_over_when_the_computation_goes_on_and_is_not_awaited(bench: StreamerBench) -> None:
    bench.receivers.is_open = False
    bench.step(*STEP)
    bench.step(pool_row(A, 0, 1, 1))
    assert [owner for owner, _ in bench.receivers.letters] == ["t0", "t1"] * 2
    assert not any(future.done() for future in bench.receivers.futures)
    assert (bench.streamer.counters.jobs, bench.streamer.counters.bytes_out) == (2, 3 * POSITION_BYTES)


def test_the_cells_of_a_step_may_be_overwritten_at_once(bench: StreamerBench) -> None:
    bench.receivers.is_open = False
    before = bench.sent(0, 1).clone()
    bench.step(*STEP)
    bench.pool.cells_LCRHSD.fill_(-1.0)
    bench.streamer.settle(frozenset({0, 2}))
    bench.receivers.open()
    bench.streamer.drain(30)
    assert torch.equal(bench.received(A, 1), before)


def test_only_handing_over_is_exposed(bench: StreamerBench) -> None:
    bench.receivers.is_open = False
    bench.receivers.on_send = lambda: bench.clock.advance(1.0)
    bench.step(*STEP)
    bench.clock.advance(100.0)
    bench.receivers.open()
    bench.streamer.drain(30)
    assert (bench.streamer.counters.exposed_s, bench.streamer.counters.busy_s) == (2.0, 2.0)
    spans = [(span.name, span.end_s - span.start_s) for span in bench.spans]
    assert spans == [("stream_out", 2.0), ("stream_wait", 2.0), ("flush", 100.0)]


@pytest.mark.parametrize("refused", [True, False], ids=["refused", "failed later"])
def test_an_error_of_the_network_is_reported_once_and_not_raised(bench: StreamerBench, refused: bool) -> None:
    error = OSError("the peer is gone")
    bench.receivers.refuse, bench.receivers.fail = (error, None) if refused else (None, error)
    bench.step(*STEP)
    bench.streamer.drain(0)
    assert bench.errors == [(error, (A, B))]
    assert (bench.staging.num_out, bench.streamer.counters.failed_jobs) == (0, 1)


def test_a_step_that_finds_no_staging_buffer_in_time_is_reported_and_not_raised() -> None:
    bench = StreamerBench(copier=CpuCopier(), num_buffers=2, timeout_s=0.05)
    bench.receivers.is_open = False
    bench.step(*STEP)
    bench.step(pool_row(A, 0, 1, 1))
    bench.close()
    ((error, row_ids),) = bench.errors
    assert isinstance(error, StagingTimeout)
    assert row_ids == (A,)
    assert torch.equal(bench.received(B, 1), bench.sent(2, 1))


def test_steps_and_prompt_layers_that_leave_at_the_same_time_arrive_whole() -> None:
    bench = StreamerBench(copier=CpuCopier(), num_buffers=1, max_queued_jobs=2)
    for position in range(3, 8):
        bench.prompt_layers(pool_row(A, 0, 3))
        bench.step(pool_row(A, 0, 1, position), pool_row(B, 2, 1, position - 3))
    bench.streamer.end_pass()
    bench.close()
    assert torch.equal(bench.received(A, 8), bench.sent(0, 8))
    assert torch.equal(bench.received(B, 5), bench.sent(2, 5))
    assert bench.errors == []
