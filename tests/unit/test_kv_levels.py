"""The streaming levels: what is a message of its own, what is awaited, what leaves beside the computation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from dejavu.ids import RowId
from dejavu.kv.layout import LayerRange
from dejavu.kv.levels import StreamingLevel

from harness.streamer_kit import LAYERS, POSITION_BYTES, StreamerBench, log_of, pool_row

OFF, NAIVE, BUFFERED, LAYERWISE, FULL = StreamingLevel
SENDING = [NAIVE, BUFFERED, LAYERWISE, FULL]
A, B = RowId(1), RowId(2)
PROMPTS = (pool_row(A, 0, 3), pool_row(B, 2, 5))
STEP = (pool_row(A, 0, 1, 3), pool_row(B, 2, 1, 5))
NUM_STEP_PIECES = 2 * 3 * 2 * 2
"""K and V, layers, heads, rows."""
NUM_OWNERS = 2


def named(level: StreamingLevel) -> str:
    return level.value


class Benches:
    """Makes benches and closes them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def __call__(self, level: StreamingLevel, **kwargs: int) -> StreamerBench:
        bench = StreamerBench(level, **kwargs)
        self._stack.callback(bench.close)
        return bench


@pytest.fixture
def benches() -> Iterator[Benches]:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        yield Benches(stack)


def kinds_of_message(bench: StreamerBench) -> set[tuple[int, int, int, int]]:
    """Chunks, layers, kinds and heads of each message."""
    return {
        (len(message.chunks), len(chunk.layers), chunk.kinds[1] - chunk.kinds[0], chunk.heads[1] - chunk.heads[0])
        for _, message in bench.receivers.letters
        for chunk in message.chunks
    }


def test_off_sends_nothing_and_counts_nothing(benches: Benches) -> None:
    bench = benches(OFF)
    bench.prompt_layers(*PROMPTS)
    bench.streamer.submit_rows(bench.pool, PROMPTS, made_by="prompt")
    bench.streamer.end_pass()
    bench.step(*STEP)
    bench.streamer.drain(30)
    assert bench.receivers.letters == []
    assert (bench.streamer.counters.jobs, bench.spans) == (0, [])


def test_naive_sends_each_contiguous_piece_of_a_step_as_a_message_of_its_own(benches: Benches) -> None:
    bench = benches(NAIVE)
    bench.step(*STEP)
    assert len(bench.receivers.letters) == NUM_STEP_PIECES
    assert kinds_of_message(bench) == {(1, 1, 1, 1)}


@pytest.mark.parametrize("from_pool", [True, False])
def test_naive_sends_each_contiguous_piece_of_a_prompt_at_the_end_of_its_pass(
    benches: Benches, from_pool: bool
) -> None:
    bench = benches(NAIVE)
    if from_pool:
        bench.streamer.submit_rows(bench.pool, PROMPTS, made_by="prompt")
    else:
        bench.prompt_layers(*PROMPTS)
    assert bench.receivers.letters == []
    bench.streamer.end_pass()
    assert len(bench.receivers.letters) == NUM_STEP_PIECES
    assert kinds_of_message(bench) == {(1, 1, 1, 1)}
    assert {chunk.positions for chunk in bench.receivers.chunks} == {(0, 3), (0, 5)}


def test_naive_awaits_each_piece_before_the_next(benches: Benches) -> None:
    bench = benches(NAIVE)
    log = log_of(bench, lambda: bench.step(*STEP), NUM_STEP_PIECES)
    assert log == ["answered"] * NUM_STEP_PIECES + ["computing goes on"]
    assert bench.receivers.unresolved_at_send == [0] * NUM_STEP_PIECES


def test_buffered_sends_a_prompt_pass_as_one_message_for_each_owner_at_its_end(benches: Benches) -> None:
    bench = benches(BUFFERED)
    bench.prompt_layers(*PROMPTS)
    assert bench.receivers.letters == []
    bench.streamer.end_pass()
    assert [owner for owner, _ in bench.receivers.letters] == ["t0", "t1"]
    bench.streamer.end_pass()
    assert len(bench.receivers.letters) == NUM_OWNERS


def test_buffered_awaits_the_messages_of_a_prompt_pass(benches: Benches) -> None:
    bench = benches(BUFFERED)
    bench.prompt_layers(*PROMPTS)
    log = log_of(bench, bench.streamer.end_pass, NUM_OWNERS)
    assert log == ["answered"] * NUM_OWNERS + ["computing goes on"]


@pytest.mark.parametrize("level", [BUFFERED, LAYERWISE], ids=named)
def test_a_step_below_full_is_one_message_for_each_owner_and_is_awaited(
    benches: Benches, level: StreamingLevel
) -> None:
    bench = benches(level)
    log = log_of(bench, lambda: bench.step(*STEP), NUM_OWNERS)
    assert log == ["answered"] * NUM_OWNERS + ["computing goes on"]


@pytest.mark.parametrize("level", [LAYERWISE, FULL], ids=named)
@pytest.mark.parametrize("from_pool", [True, False])
def test_prompt_layers_leave_before_their_pass_ends_and_are_not_awaited(
    benches: Benches, level: StreamingLevel, from_pool: bool
) -> None:
    bench = benches(level)
    bench.receivers.is_open = False
    if from_pool:
        for layer in LAYERS.indices:
            layers = LayerRange(layer, layer + 1)
            bench.streamer.submit_rows(bench.pool, PROMPTS, made_by="prompt", layers=layers)
    else:
        bench.prompt_layers(*PROMPTS)
    bench.receivers.await_letters(len(LAYERS))
    bench.streamer.end_pass()
    assert [(owner, message.chunks[0].layers) for owner, message in bench.receivers.letters] == [
        ("t0", LayerRange(0, 1)),
        ("t0", LayerRange(1, 2)),
        ("t1", LayerRange(2, 3)),
    ]
    assert bench.receivers.unresolved_at_send == [0, 1, 2]


def test_full_awaits_no_step(benches: Benches) -> None:
    bench = benches(FULL)
    bench.receivers.is_open = False
    bench.step(*STEP)
    bench.step(pool_row(A, 0, 1, 4))
    bench.receivers.await_letters(2 * NUM_OWNERS)
    assert bench.receivers.unresolved_at_send == [0, 1, 2, 3]


@pytest.mark.parametrize("level", SENDING, ids=named)
@pytest.mark.parametrize("from_pool", [True, False])
def test_every_level_delivers_the_same_cells(benches: Benches, level: StreamingLevel, from_pool: bool) -> None:
    bench = benches(level)
    if from_pool:
        bench.streamer.submit_rows(bench.pool, PROMPTS, made_by="prompt")
    else:
        bench.prompt_layers(*PROMPTS)
    bench.streamer.end_pass()
    bench.step(*STEP)
    bench.streamer.drain(30)
    assert torch.equal(bench.received(A, 4), bench.sent(0, 4))
    assert torch.equal(bench.received(B, 6), bench.sent(2, 6))
    assert (bench.streamer.counters.bytes_out, bench.errors) == ((4 + 6) * POSITION_BYTES, [])


@pytest.mark.parametrize("level", [NAIVE, BUFFERED], ids=named)
def test_an_abandoned_pass_is_forgotten_and_the_next_one_leaves(benches: Benches, level: StreamingLevel) -> None:
    bench = benches(level)
    bench.prompt_layers(pool_row(A, 0, 3))
    bench.streamer.abandon_pass()
    bench.streamer.end_pass()
    assert bench.receivers.letters == []
    bench.prompt_layers(pool_row(B, 2, 5))
    bench.streamer.end_pass()
    assert {chunk.row_id for chunk in bench.receivers.chunks} == {B}


def test_the_level_can_be_set_between_passes(benches: Benches) -> None:
    bench = benches(OFF)
    counts = []
    for level in (FULL, NAIVE, OFF, BUFFERED):
        bench.streamer.set_level(level)
        assert bench.streamer.level is level
        before = len(bench.receivers.letters)
        bench.step(*STEP)
        bench.streamer.drain(30)
        counts.append(len(bench.receivers.letters) - before)
    assert counts == [NUM_OWNERS, NUM_STEP_PIECES, 0, NUM_OWNERS]


@pytest.mark.parametrize("level", SENDING, ids=named)
@pytest.mark.parametrize("refused", [True, False], ids=["refused", "failed later"])
def test_an_error_of_the_network_is_reported_once_for_a_step(
    benches: Benches, level: StreamingLevel, refused: bool
) -> None:
    bench, error = benches(level), OSError("the peer is gone")
    bench.receivers.refuse, bench.receivers.fail = (error, None) if refused else (None, error)
    bench.step(*STEP)
    bench.streamer.drain(30)
    assert bench.errors == [(error, (A, B))]
    assert (bench.staging.num_out, bench.streamer.counters.failed_jobs) == (0, 1)
    bench.receivers.refuse = bench.receivers.fail = None
    bench.step(*STEP)
    bench.streamer.drain(30)
    assert len(bench.errors) == 1


@pytest.mark.parametrize("level", SENDING, ids=named)
def test_an_error_of_the_network_in_a_prompt_pass_is_reported_once_for_each_job(
    benches: Benches, level: StreamingLevel
) -> None:
    bench = benches(level)
    bench.receivers.fail = OSError("the peer is gone")
    bench.prompt_layers(*PROMPTS)
    bench.streamer.end_pass()
    bench.streamer.drain(30)
    num_jobs = len(LAYERS) if level.prompts_in_background else 1
    assert [row_ids for _, row_ids in bench.errors] == [(A, B)] * num_jobs
    assert bench.staging.num_out == 0


@pytest.mark.parametrize(
    "level",
    [
        NAIVE,
        BUFFERED,
    ],
    ids=named,
)
def test_a_network_that_does_not_answer_in_time_is_an_error_that_says_so(level: StreamingLevel) -> None:
    bench = StreamerBench(level, timeout_s=0.05)
    bench.receivers.is_open = False
    bench.step(*STEP)
    bench.close()
    ((error, row_ids),) = bench.errors
    assert row_ids == (A, B)
    assert "had not left after 0.05 s" in str(error)


@pytest.mark.parametrize(("level", "num_transfers"), [(NAIVE, NUM_STEP_PIECES), (BUFFERED, NUM_OWNERS)], ids=str)
def test_what_the_computation_waits_for_is_exposed_and_on_the_timeline(
    benches: Benches, level: StreamingLevel, num_transfers: int
) -> None:
    bench = benches(level)
    bench.receivers.on_send = lambda: bench.clock.advance(1.0)
    bench.step(*STEP)
    counters = bench.streamer.counters
    assert counters.exposed_s == counters.busy_s == num_transfers
    assert (counters.jobs, counters.messages, counters.bytes_out) == (1, num_transfers, 2 * POSITION_BYTES)
    assert [
        (span.name, span.made_by, span.start_s, span.end_s, span.num_bytes, span.num_transfers) for span in bench.spans
    ] == [
        ("stream_out", "step", 0, num_transfers, 2 * POSITION_BYTES, num_transfers),
        ("flush", "step", num_transfers, num_transfers, 2 * POSITION_BYTES, num_transfers),
        ("stream_wait", "step", 0, num_transfers, 0, 0),
    ]


def test_what_leaves_beside_the_computation_is_busy_and_not_exposed(benches: Benches) -> None:
    bench, goes_on = benches(FULL), threading.Event()

    def slow() -> None:
        assert goes_on.wait(30)
        bench.clock.advance(1.0)

    bench.receivers.on_send = slow
    bench.prompt_layers(*PROMPTS)
    bench.streamer.end_pass()
    goes_on.set()
    bench.streamer.drain(30)
    counters = bench.streamer.counters
    assert (counters.exposed_s, counters.busy_s, counters.jobs) == (0, len(LAYERS), len(LAYERS))
    assert [(span.name, span.made_by, span.num_transfers) for span in bench.spans] == [
        ("stream_out", "prompt", 1),
        ("flush", "prompt", 1),
    ] * len(LAYERS)
    assert sum(span.num_bytes for span in bench.spans if span.name == "flush") == 8 * POSITION_BYTES
