"""The streamer's thread: order, back-pressure, errors, the end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
import torch

from dejavu.clock import VirtualClock
from dejavu.ids import Epoch, RowId
from dejavu.kv.chunk import decode_message
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.primitives import StreamSetup
from dejavu.kv.route import Holding, RowSpan
from dejavu.kv.staging import StagingRing
from dejavu.kv.streamer import Streamer, StreamStalled

LAYOUT = KvLayout(model_hash="m", num_layers=8, num_kv_heads=1, head_dim=2, dtype="float32", max_length=8)
HOLDING = Holding(owner="w", layers=LayerRange(0, 8), heads=(0, 1))
ROWS = [RowSpan(row_id=RowId(1), length=2), RowSpan(row_id=RowId(2), length=4)]


class Network:
    """Sends at once, or holds every message until ``open`` is called; fails when told to."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.held: list[Future[None]] = []
        self.is_open = True
        self.refuse: Exception | None = None
        self.arrived = threading.Semaphore(0)

    def send(self, owner: str, header: bytes, payload: Sequence[memoryview]) -> Future[None]:
        if self.refuse is not None:
            raise self.refuse
        self.layers.append(decode_message(header).chunks[0].layers.start)
        future: Future[None] = Future()
        if self.is_open:
            future.set_result(None)
        else:
            self.held.append(future)
        self.arrived.release()
        return future


class Bench:
    """A streamer, its network, and what it reported."""

    def __init__(self, *, num_buffers: int = 2, max_queued_jobs: int = 2) -> None:
        self.network = Network()
        self.staging = StagingRing(num_buffers, 4096)
        self.errors: list[tuple[str, tuple[RowId, ...]]] = []
        self.spans: list[tuple[str, int]] = []
        self.streamer = Streamer(
            StreamSetup(cluster="c", epoch=Epoch(1), source=HOLDING, targets=(HOLDING,), layout=LAYOUT),
            self.staging,
            self.network,
            on_error=lambda error, row_ids: self.errors.append((str(error), row_ids)),
            on_span=lambda span: self.spans.append((span.name, span.num_bytes)),
            clock=VirtualClock(),
            max_queued_jobs=max_queued_jobs,
            timeout_s=30,
        )

    def submit(self, layer: int) -> None:
        cells = torch.zeros(2, 1, 4, 2)
        self.streamer.submit(layer, cells, cells, ROWS)


@pytest.fixture
def bench() -> Iterator[Bench]:
    before = set(threading.enumerate())
    bench = Bench()
    yield bench
    for future in bench.network.held:
        if not future.done():
            future.set_result(None)
    bench.streamer.close(30)
    assert bench.staging.num_out == 0
    assert not any(thread.name == "kv-streamer" for thread in set(threading.enumerate()) - before)


def test_layers_leave_in_the_order_in_which_they_were_submitted(bench: Bench) -> None:
    for layer in range(8):
        bench.submit(layer)
    bench.streamer.drain(30)
    assert bench.network.layers == list(range(8))
    counters = bench.streamer.counters
    assert (counters.jobs, counters.messages, counters.chunks) == (8, 8, 16)
    assert counters.bytes_out == 8 * 6 * 2 * 2 * 4
    assert bench.spans.count(("stream_out", 96)) == bench.spans.count(("flush", 96)) == 8


def test_drain_waits_for_the_network_and_not_only_for_the_queue(bench: Bench) -> None:
    bench.network.is_open = False
    bench.submit(0)
    assert bench.network.arrived.acquire(timeout=30)
    with pytest.raises(StreamStalled, match=r"1 jobs \(0 queued\) had not left"):
        bench.streamer.drain(0)
    bench.network.held[0].set_result(None)
    bench.streamer.drain(30)


def test_a_slow_network_blocks_submit_and_bounds_what_waits(bench: Bench) -> None:
    bench.network.is_open = False
    submitted: list[int] = []

    def compute() -> None:
        for layer in range(8):
            bench.submit(layer)
            submitted.append(layer)

    computing = threading.Thread(target=compute)
    computing.start()
    for _ in range(2):
        assert bench.network.arrived.acquire(timeout=30)
    # Two messages hold the staging ring, one layer is in the thread's hand, two are queued: five at most.
    assert len(submitted) <= 5
    for index in range(8):
        bench.network.held[index].set_result(None)
        if index < 6:
            assert bench.network.arrived.acquire(timeout=30)
    computing.join(30)
    bench.streamer.drain(30)
    assert bench.network.layers == list(range(8))


def test_a_sender_that_refuses_is_reported_with_its_rows_and_the_thread_lives_on(bench: Bench) -> None:
    bench.network.refuse = OSError("no such peer")
    bench.submit(0)
    bench.streamer.drain(30)
    assert bench.errors == [("no such peer", (RowId(1), RowId(2)))]
    bench.network.refuse = None
    bench.submit(1)
    bench.streamer.drain(30)
    assert bench.network.layers == [1]
    assert bench.streamer.counters.failed_jobs == 1


def test_a_send_that_fails_later_is_reported_with_its_rows(bench: Bench) -> None:
    bench.network.is_open = False
    bench.submit(0)
    assert bench.network.arrived.acquire(timeout=30)
    bench.network.held[0].set_exception(OSError("peer died"))
    bench.streamer.drain(30)
    assert bench.errors == [("peer died", (RowId(1), RowId(2)))]


def test_a_layer_of_another_stage_is_reported_and_not_sent(bench: Bench) -> None:
    bench.submit(8)
    bench.streamer.drain(30)
    assert "layer 8 is not one of w's" in bench.errors[0][0]


def test_tensors_are_let_go_once_staged_although_the_network_still_holds_the_message(bench: Bench) -> None:
    bench.network.is_open = False
    keys = torch.zeros(2, 1, 4, 2)
    alive = weakref.ref(keys)
    bench.streamer.submit(0, keys, keys.clone(), ROWS)
    del keys
    bench.submit(1)
    for _ in range(2):
        assert bench.network.arrived.acquire(timeout=30)
    gc.collect()
    assert alive() is None


def test_close_reports_what_was_still_queued_and_refuses_more() -> None:
    bench = Bench(num_buffers=1)
    bench.network.is_open = False
    bench.submit(0)
    assert bench.network.arrived.acquire(timeout=30)
    bench.submit(1)
    closing = threading.Thread(target=bench.streamer.close, args=(30,))
    bench.submit(2)
    closing.start()
    bench.network.held[0].set_result(None)
    closing.join(30)
    assert not closing.is_alive()
    bench.network.is_open = True
    for future in bench.network.held[1:]:
        future.set_result(None)
    with pytest.raises(StreamStalled, match="the streamer is closed"):
        bench.submit(3)
    bench.streamer.drain(30)
    reported = [error for error, _ in bench.errors if "still queued" in error]
    assert len(reported) + len(bench.network.layers) == 3
    bench.streamer.close(30)
    assert bench.staging.num_out == 0
