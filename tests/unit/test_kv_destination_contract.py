"""What every destination of level 1 promises: local memory, a peer's memory over each transport, disk."""

from __future__ import annotations

import resource
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from dejavu.errors import DejavuError
from dejavu.ids import RowId
from dejavu.kv.disk import DiskLimits, DiskMemory
from dejavu.kv.disk_file import DiskError, DiskRefused
from dejavu.kv.disk_row import read_row
from dejavu.kv.disk_rows import DiskChunk, RowFiles
from dejavu.kv.layout import LayerRange
from dejavu.kv.primitives import Destination, LocalMemory, Region, flush, scatter
from dejavu.kv.staging import StagingRing, StagingTimeout
from dejavu.kv.stream import flush_staged
from dejavu.transport.base import TransportError
from dejavu.transport.credits import CreditLimit

from harness.destination_kit import (
    CLUSTER,
    EPOCH,
    ROW,
    DiskPlace,
    LocalPlace,
    PeerPlace,
    Place,
    chunk_of,
    fetched,
    put,
    transports,
)
from harness.transport_kit import WAIT_S, Bench, noise

KINDS = ["local", "peer-local", pytest.param("peer-ucx", marks=pytest.mark.slow), "disk"]
PEER_KINDS = ["local", pytest.param("ucx", marks=pytest.mark.slow)]
SIZES = (0, 1, 4095, 4096, 70_001, 5_000_000)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Place]:
    kind: str = request.param
    if kind == "local":
        yield LocalPlace()
    elif kind == "disk":
        with DiskMemory(tmp_path) as memory:
            yield DiskPlace(memory)
    else:
        with transports(kind.removeprefix("peer-"), monkeypatch) as bench:
            yield PeerPlace(bench)


@pytest.fixture(params=PEER_KINDS)
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with transports(request.param, monkeypatch) as made:
        yield made


def test_flushed_chunks_of_any_size_come_back_verified_and_equal(place: Place) -> None:
    payloads = [noise(num_bytes, seed) for seed, num_bytes in enumerate(SIZES)]
    flushed = [put(place, payload.data, position) for position, payload in enumerate(payloads)]
    assert [done.result(WAIT_S) for _, done in flushed] == [None] * len(SIZES)
    arrived = place.arrived([header for header, _ in flushed])
    assert [came for came, _ in arrived] == [chunk_of(header) for header, _ in flushed]
    assert [fetched(*chunk) for chunk in arrived] == [payload.tobytes() for payload in payloads]


def test_many_small_chunks_arrive_in_the_order_in_which_they_were_flushed(place: Place) -> None:
    payloads = [noise(1 + index % 97, index) for index in range(400)]
    flushed = [put(place, payload.data, index) for index, payload in enumerate(payloads)]
    for _, done in flushed:
        done.result(WAIT_S)
    arrived = place.arrived([header for header, _ in flushed])
    assert [header.positions[0] for header, _ in arrived] == list(range(400))
    assert [fetched(*chunk) for chunk in arrived] == [payload.tobytes() for payload in payloads]


@pytest.mark.parametrize("num_bytes", [48, 3_000_000])
def test_source_memory_overwritten_after_the_future_does_no_harm(place: Place, num_bytes: int) -> None:
    source = np.zeros(num_bytes, dtype=np.uint8)
    headers = []
    for position in range(4):
        source[:] = noise(num_bytes, position)
        header, done = put(place, source.data, position)
        done.result(WAIT_S)
        headers.append(header)
    source[:] = 0xEE
    arrived = place.arrived(headers)
    assert [fetched(*chunk) for chunk in arrived] == [noise(num_bytes, position).tobytes() for position in range(4)]


def test_local_memory_that_is_too_small_is_an_error_with_both_sizes_and_stays_as_it_was() -> None:
    into = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"4 bytes need .* got 3"):
        flush(b"", memoryview(b"abcd"), LocalMemory(into=into))
    assert not into.any()


def test_a_peer_that_is_gone_is_an_error_that_names_it_and_the_phase(bench: Bench) -> None:
    place = PeerPlace(bench)
    place.receiver.close()
    error = first_error(lambda index: put(place, noise(1000).data, index)[1])
    assert isinstance(error, TransportError)
    assert (error.peer, error.address, error.phase) == ("w1", place.address, "send")


def test_a_peer_that_takes_nothing_more_meets_the_deadline_and_gives_the_memory_back(bench: Bench) -> None:
    place = PeerPlace(bench, credits=CreditLimit(messages=1, num_bytes=1 << 20), timeout_s=0.3)
    payload = noise(100_000)
    header, first = put(place, payload.data, 0)
    first.result(WAIT_S)
    _, second = put(place, payload.data, 1)
    with pytest.raises(TransportError, match="no credits") as caught:
        second.result(WAIT_S)
    assert (caught.value.peer, caught.value.address, caught.value.phase) == ("w1", place.address, "send")
    payload[:] = 0
    assert fetched(*place.arrived([header])[0]) == noise(100_000).tobytes()
    assert place.inbox.messages.empty()


def test_a_disk_memory_that_was_closed_is_an_error_that_names_folder_and_phase(tmp_path: Path) -> None:
    memory = DiskMemory(tmp_path)
    memory.close()
    with pytest.raises(DiskError) as caught:
        put(DiskPlace(memory), memoryview(b"abcd"), 0)
    assert (caught.value.path, caught.value.phase) == (tmp_path, "queue")


def test_a_folder_that_was_removed_is_an_error_that_names_it_and_the_phase(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with DiskMemory(folder) as memory:
        shutil.rmtree(folder)
        _, done = put(DiskPlace(memory), memoryview(b"abcd"), 0)
        with pytest.raises(DiskError, match="No such file") as caught:
            done.result(WAIT_S)
    assert caught.value.path.parent == folder
    assert caught.value.phase == "open"


def test_files_that_were_removed_under_a_row_that_is_being_written_are_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with DiskMemory(folder) as memory:
        place = DiskPlace(memory)
        put(place, memoryview(b"abcd"), 0)[1].result(WAIT_S)
        shutil.rmtree(folder)
        with pytest.raises(DiskError) as caught:
            put(place, memoryview(b"efgh"), 1)[1].result(WAIT_S)
    assert caught.value.path.parent == folder
    assert caught.value.phase == "write"


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The kernel refuses this process longer files, as it refuses writes to a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("direct", [None, False], ids=["as-found", "through-the-cache"])
def test_a_disk_that_takes_no_more_is_an_error_with_file_and_phase_and_earlier_chunks_stay(
    tmp_path: Path, direct: bool | None
) -> None:
    with DiskMemory(tmp_path, direct=direct) as memory:
        place = DiskPlace(memory)
        header, first = put(place, noise(100_000).data, 0)
        first.result(WAIT_S)
        with files_of_at_most(1 << 20):
            _, refused = put(place, noise(4 << 20).data, 1)
            with pytest.raises(DiskRefused) as caught:
                refused.result(WAIT_S)
        later, after = put(place, noise(50_000, 2).data, 2)
        after.result(WAIT_S)
        arrived = place.arrived([header, later])
    assert (caught.value.path, caught.value.phase) == (tmp_path / f"{ROW}.kv", "write")
    assert [came.positions[0] for came, _ in arrived] == [0, 2]
    assert [fetched(*chunk) for chunk in arrived] == [noise(100_000).tobytes(), noise(50_000, 2).tobytes()]


class HeldDisk:
    """The writing thread stops at its next append until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.let_go = threading.Event(), threading.Event()
        append = RowFiles.append

        def held(files: RowFiles, row_id: RowId, chunks: Sequence[DiskChunk]) -> None:
            self.reached.set()
            assert self.let_go.wait(WAIT_S)
            append(files, row_id, chunks)

        monkeypatch.setattr(RowFiles, "append", held)


def test_a_disk_that_is_slow_meets_the_deadline_with_the_folder_and_the_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldDisk(monkeypatch)
    memory = DiskMemory(tmp_path, limits=DiskLimits(queue_bytes=4, timeout_s=0.2))
    # One message is being written and one waits; the writing thread may not have taken the first one yet.
    put(DiskPlace(memory), memoryview(b"abcd"), 0)
    assert held.reached.wait(WAIT_S)
    put(DiskPlace(memory), memoryview(b"abcd"), 1)
    with pytest.raises(DiskError) as caught:
        put(DiskPlace(memory), memoryview(b"abcd"), 2)
    assert (caught.value.path, caught.value.phase) == (tmp_path, "queue")
    with pytest.raises(DiskError) as caught:
        memory.close()
    assert (caught.value.path, caught.value.phase) == (tmp_path, "close")
    held.let_go.set()
    close_at_last(memory)


def first_error(attempt: Callable[[int], Future[None]]) -> DejavuError:
    """What the first of many attempts to fail has failed with, at once or through its future."""
    for index in range(1000):
        try:
            attempt(index).result(WAIT_S)
        except DejavuError as error:
            return error
    raise AssertionError("a thousand messages were taken")


def close_at_last(memory: DiskMemory) -> None:
    """The writing thread has ended, though the memory's own deadline is short."""
    for thread in threading.enumerate():
        if thread.name == "kv-disk":
            thread.join(WAIT_S)
    memory.close()


def stream_until_stuck(destination: Destination, staging: StagingRing) -> list[Future[None]]:
    """Messages leave through a small staging ring until no buffer of it comes back. Raises StagingTimeout."""
    sent: list[Future[None]] = []
    for position in range(1000):
        region = Region(
            row_id=ROW,
            layers=LayerRange(0, 1),
            heads=(0, 1),
            positions=(position, position + 1),
            parts=(torch.ones(1, 2, 1, 1, 256),),
        )
        for staged in scatter([region], staging, cluster=CLUSTER, epoch=EPOCH, dtype="float32", timeout_s=0.2):
            sent.append(flush_staged(staged, CLUSTER, EPOCH, destination))
    return sent


def test_a_slow_peer_stops_the_staging_ring_at_its_deadline_and_the_ring_is_whole_afterwards(bench: Bench) -> None:
    place = PeerPlace(bench, credits=CreditLimit(messages=2, num_bytes=1 << 20))
    staging = StagingRing(3, 4096)
    with pytest.raises(StagingTimeout, match="all 3 staging buffers"):
        stream_until_stuck(place.destination(0), staging)
    assert staging.num_out == 3
    place.link.abort()
    assert staging.num_out == 0


def test_a_slow_disk_stops_the_staging_ring_at_its_deadline_and_the_ring_is_whole_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, staging = HeldDisk(monkeypatch), StagingRing(3, 4096)
    with DiskMemory(tmp_path) as memory:
        with pytest.raises(StagingTimeout, match="all 3 staging buffers"):
            stream_until_stuck(memory, staging)
        assert staging.num_out == 3
        held.let_go.set()
    assert staging.num_out == 0
    assert len(read_row(tmp_path, ROW, cluster=CLUSTER).records) == 3
