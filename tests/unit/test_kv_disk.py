"""Disk as a destination: round trips over a restart, torn and damaged files, limits, and what is left behind."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from dejavu.clock import VirtualClock
from dejavu.errors import ConfigError
from dejavu.ids import Epoch, RowId
from dejavu.kv import disk_file
from dejavu.kv.chunk import ChunkCorrupt, KvMessage, encode_message, seal
from dejavu.kv.disk import DiskLimits, DiskMemory
from dejavu.kv.disk_file import DiskError, DiskRefused
from dejavu.kv.disk_index import INDEX_SUFFIX, stored_rows
from dejavu.kv.disk_row import RowIncomplete, read_row
from dejavu.kv.disk_rows import DiskChunk, RowFiles
from dejavu.kv.disk_run import BLOCK_BYTES
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.primitives import Destinations, StreamSetup, stream_in, stream_out
from dejavu.kv.route import Holding, RowSpan
from dejavu.kv.staging import StagingRing

LAYOUT = KvLayout(model_hash="m", num_layers=4, num_kv_heads=2, head_dim=3, dtype="float32", max_length=16)
POSITION_BYTES = 2 * 2 * 3 * 4
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "kv-disk"] == []
    assert open_files() == before


@pytest.fixture(params=[None, False], ids=["found", "cached"])
def direct(request: pytest.FixtureRequest) -> bool | None:
    """The regime: what the file system takes, and the fallback."""
    return request.param


def bytes_of(row_id: int, position: int, num_bytes: int = POSITION_BYTES) -> bytes:
    return bytes((row_id * 31 + position * 7 + index) % 256 for index in range(num_bytes))


def message(*cells: tuple[int, int, bytes], epoch: int = 1, cluster: str = "c") -> tuple[bytes, memoryview]:
    """One chunk of layer 0 for each (row id, position, bytes)."""
    chunks = tuple(
        seal(
            epoch=Epoch(epoch),
            row_id=RowId(row_id),
            layers=LayerRange(0, 1),
            heads=(0, 2),
            positions=(position, position + 1),
            dtype="float32",
            payload=memoryview(data),
        )
        for row_id, position, data in cells
    )
    header = encode_message(KvMessage(cluster=cluster, epoch=Epoch(epoch), chunks=chunks))
    return header, memoryview(b"".join(data for _, _, data in cells))


def put(memory: DiskMemory, row_id: int, *positions: int) -> None:
    futures = [memory.put(*message((row_id, position, bytes_of(row_id, position)))) for position in positions]
    for future in futures:
        future.result(WAIT_S)


def payloads(folder: Path, row_id: int) -> dict[int, bytes]:
    row = read_row(folder, RowId(row_id), cluster="c")
    return {record.header.positions[0]: bytes(row.read(record)) for record in row.records}


def wanted(row_id: int, *positions: int) -> dict[int, bytes]:
    return {position: bytes_of(row_id, position) for position in positions}


def holding(owner: str, start: int, stop: int, heads: tuple[int, int] = (0, 2)) -> Holding:
    return Holding(owner=owner, layers=LayerRange(start, stop), heads=heads)


def stream_to(folder: Path, lengths: list[int], direct: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [L, B, H, T, D] of rows 10, 11, ... that were streamed out, one folder for each of two owners."""
    keys, values = torch.randn(2, 4, len(lengths), 2, max(lengths), 3)
    setup = StreamSetup(
        cluster="c",
        epoch=Epoch(1),
        source=holding("p", 0, 4),
        targets=(holding("t0", 0, 1), holding("t1", 1, 4)),
        layout=LAYOUT,
    )
    staging = StagingRing(2, 1000)
    rows = [RowSpan(row_id=RowId(10 + index), length=length) for index, length in enumerate(lengths)]
    with DiskMemory(folder / "t0", direct=direct) as first, DiskMemory(folder / "t1", direct=direct) as second:
        sender = Destinations(by_owner={"t0": first, "t1": second})
        for layer in range(4):
            for sent in stream_out(layer, keys[layer], values[layer], rows, setup, staging, sender).sends:
                sent.result(WAIT_S)
    assert staging.num_out == 0
    return keys, values


def test_a_streamed_row_comes_back_after_a_restart(tmp_path: Path, direct: bool | None) -> None:
    keys, values = stream_to(tmp_path, [5, 16], direct)
    pool = KvPool(LAYOUT, LayerRange(1, 4), 2)
    for index, length in enumerate((5, 16)):
        row = read_row(tmp_path / "t1", RowId(10 + index), cluster="c")
        stream_in(row.landed(LAYOUT, holding("t1", 1, 4), length), pool, index)
        for layer in (1, 2, 3):
            assert torch.equal(pool.keys(layer)[index, :, :length], keys[layer, index, :, :length])
            assert torch.equal(pool.values(layer)[index, :, :length], values[layer, index, :, :length])


def test_a_row_is_read_into_a_holding_of_another_cut(tmp_path: Path) -> None:
    keys, values = stream_to(tmp_path, [9])
    row = read_row(tmp_path / "t1", RowId(10), cluster="c")
    landed = row.landed(LAYOUT, holding("elsewhere", 2, 3, heads=(1, 2)), 7)
    assert torch.equal(landed.cells_LCHTD[0], torch.stack((keys[2, 0, 1:, :7], values[2, 0, 1:, :7])))


def test_a_new_memory_continues_the_rows_of_an_old_one(tmp_path: Path, direct: bool | None) -> None:
    with DiskMemory(tmp_path, direct=direct) as memory:
        put(memory, 1, 0, 1)
    with DiskMemory(tmp_path, direct=direct) as memory:
        put(memory, 1, 2)
        put(memory, 2, 0)
    assert payloads(tmp_path, 1) == wanted(1, 0, 1, 2)
    assert stored_rows(tmp_path) == (1, 2)


def test_interleaved_rows_keep_their_own_bytes(tmp_path: Path, direct: bool | None) -> None:
    with DiskMemory(tmp_path, direct=direct, limits=DiskLimits(open_rows=1, cached_bytes=1)) as memory:
        both = message((1, 0, bytes_of(1, 0)), (2, 0, bytes_of(2, 0)), (1, 1, bytes_of(1, 1)))
        memory.put(*both).result(WAIT_S)
        for position in range(2, 6):
            put(memory, 2, position)
            put(memory, 1, position)
        assert memory.counters.chunks == 11
        assert memory.counters.bytes_written == 11 * POSITION_BYTES
    assert payloads(tmp_path, 1) == wanted(1, *range(6))
    assert payloads(tmp_path, 2) == wanted(2, 0, *range(2, 6))


def test_a_row_can_be_read_while_it_grows(tmp_path: Path, direct: bool | None) -> None:
    with DiskMemory(tmp_path, direct=direct) as memory:
        for position in range(16):
            put(memory, 1, position)
            assert payloads(tmp_path, 1) == wanted(1, *range(position + 1))


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 7])
def test_chunks_around_a_block_and_beyond_the_write_buffer_come_back(
    num_bytes: int, tmp_path: Path, direct: bool | None
) -> None:
    data = [bytes_of(1, position, num_bytes) for position in range(3)]
    with DiskMemory(tmp_path, direct=direct, limits=DiskLimits(write_bytes=2 * BLOCK_BYTES)) as memory:
        for position, payload in enumerate(data):
            memory.put(*message((1, position, payload))).result(WAIT_S)
    assert payloads(tmp_path, 1) == dict(enumerate(data))


@pytest.mark.parametrize("cut", [1, 20, 40])
def test_a_torn_end_of_the_index_costs_only_its_chunk(cut: int, tmp_path: Path, direct: bool | None) -> None:
    with DiskMemory(tmp_path, direct=direct) as memory:
        put(memory, 1, 0, 1, 2)
    index = tmp_path / f"1{INDEX_SUFFIX}"
    os.truncate(index, index.stat().st_size - cut)
    assert payloads(tmp_path, 1) == wanted(1, 0, 1)
    with DiskMemory(tmp_path, direct=direct) as memory:
        put(memory, 1, 3)
    assert payloads(tmp_path, 1) == wanted(1, 0, 1, 3)


def test_a_flipped_bit_in_the_index_ends_it_there(tmp_path: Path) -> None:
    with DiskMemory(tmp_path) as memory:
        put(memory, 1, 0, 1)
    index = tmp_path / f"1{INDEX_SUFFIX}"
    data = bytearray(index.read_bytes())
    data[-3] ^= 1
    index.write_bytes(data)
    assert payloads(tmp_path, 1) == wanted(1, 0)


def test_a_flipped_byte_is_named_with_file_and_offset(tmp_path: Path) -> None:
    stream_to(tmp_path, [9])
    row = read_row(tmp_path / "t1", RowId(10), cluster="c")
    record = row.records[-1]
    data = bytearray(row.path.read_bytes())
    data[record.offset + 5] ^= 1
    row.path.write_bytes(data)
    with pytest.raises(ChunkCorrupt, match=rf"10\.kv at {record.offset}: row 10 .* checksum"):
        row.read(record)
    with pytest.raises(ChunkCorrupt, match=rf"cells missing.*10\.kv at {record.offset}"):
        row.landed(LAYOUT, holding("t1", 1, 4), 9)


def test_a_corrupt_chunk_does_no_harm_when_its_cells_came_again(tmp_path: Path) -> None:
    layout = KvLayout(model_hash="m", num_layers=1, num_kv_heads=2, head_dim=3, dtype="float32", max_length=16)
    with DiskMemory(tmp_path) as memory:
        put(memory, 1, 0, 1, 0)
    with (tmp_path / "1.kv").open("r+b") as file:
        file.write(b"\xff\xff")
    landed = read_row(tmp_path, RowId(1), cluster="c").landed(layout, holding("t", 0, 1), 2)
    assert landed.cells_LCHTD.shape == (1, 2, 2, 2, 3)


def test_a_file_that_is_too_short_or_gone_is_named(tmp_path: Path) -> None:
    with DiskMemory(tmp_path) as memory:
        put(memory, 1, 0, 1)
    row = read_row(tmp_path, RowId(1), cluster="c")
    os.truncate(row.path, POSITION_BYTES + 1)
    with pytest.raises(ChunkCorrupt, match=r"1\.kv at 48: .* 1 bytes came, 48 were sealed"):
        row.read(row.records[1])
    row.path.unlink()
    with pytest.raises(DiskError, match=r"read .*1\.kv: No such file") as caught:
        row.read(row.records[0])
    assert (caught.value.path, caught.value.phase) == (row.path, "read")


def test_a_row_that_lacks_cells_says_which(tmp_path: Path) -> None:
    with DiskMemory(tmp_path) as memory:
        put(memory, 1, 0, 2)
        memory.put(*message((1, 1, bytes_of(1, 1)), epoch=2)).result(WAIT_S)
    row = read_row(tmp_path, RowId(1), cluster="c")
    with pytest.raises(RowIncomplete, match=r"1\.kv: row 1: .* first layer 0 K head 0 position 1"):
        row.landed(LAYOUT, holding("t", 0, 1), 3, epoch=Epoch(1))
    assert row.landed(LAYOUT, holding("t", 0, 1), 3).length == 3
    with pytest.raises(RowIncomplete, match="first layer 1 K head 0 position 0"):
        row.landed(LAYOUT, holding("t", 0, 2), 3)
    with pytest.raises(ValueError, match=r"length 17 is not within 1\.\.16"):
        row.landed(LAYOUT, holding("t", 0, 1), 17)


def test_a_chunk_of_another_model_is_refused(tmp_path: Path) -> None:
    with DiskMemory(tmp_path) as memory:
        put(memory, 1, 0)
    other = KvLayout(model_hash="m", num_layers=4, num_kv_heads=2, head_dim=5, dtype="float32", max_length=16)
    with pytest.raises(ChunkCorrupt, match="48 bytes, 80 in model=m"):
        read_row(tmp_path, RowId(1), cluster="c").landed(other, holding("t", 0, 1), 1)


def test_another_clusters_chunks_are_never_read(tmp_path: Path) -> None:
    with DiskMemory(tmp_path) as memory:
        memory.put(*message((1, 0, bytes_of(9, 9)), cluster="other")).result(WAIT_S)
        with pytest.raises(RowIncomplete, match=r"nothing of row 1 of cluster 'c', only of \['other'\]"):
            read_row(tmp_path, RowId(1), cluster="c")
        put(memory, 1, 0)
    assert payloads(tmp_path, 1) == wanted(1, 0)


def test_a_dropped_row_leaves_no_file_and_its_late_chunks_make_none(tmp_path: Path, direct: bool | None) -> None:
    with DiskMemory(tmp_path, direct=direct) as memory:
        put(memory, 1, 0)
        put(memory, 2, 0)
        memory.drop(RowId(1)).result(WAIT_S)
        memory.drop(RowId(7)).result(WAIT_S)
        put(memory, 1, 1)
        assert memory.counters.stale == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["2.index", "2.kv", "writer.lock"]


def test_thousands_of_rows_need_few_descriptors(tmp_path: Path) -> None:
    with DiskMemory(tmp_path, direct=False, limits=DiskLimits(open_rows=4)) as memory:
        before = len(os.listdir("/proc/self/fd"))
        futures = [memory.put(*message((row, 0, b"x"))) for row in range(1000)]
        for future in futures:
            future.result(WAIT_S)
        assert len(os.listdir("/proc/self/fd")) <= before + 8
    assert len(stored_rows(tmp_path)) == 1000


def test_closing_writes_everything_and_takes_nothing_more(tmp_path: Path) -> None:
    memory = DiskMemory(tmp_path)
    futures = [memory.put(*message((1, position, bytes_of(1, position)))) for position in range(16)]
    memory.close()
    memory.close()
    assert all(future.done() and future.exception() is None for future in futures)
    with pytest.raises(DiskError, match=r"queue .*it was closed"):
        memory.put(*message((1, 0, b"")))
    assert payloads(tmp_path, 1) == wanted(1, *range(16))


def test_a_header_that_is_none_or_announces_other_bytes_is_refused(tmp_path: Path) -> None:
    with DiskMemory(tmp_path) as memory:
        with pytest.raises(ChunkCorrupt, match="unreadable KV message"):
            memory.put(b"nonsense", memoryview(b""))
        with pytest.raises(ValueError, match="a payload of 3 bytes, its header announces 4"):
            memory.put(message((1, 0, b"abcd"))[0], memoryview(b"abc"))


class Held:
    """Stops the writing thread at its next append, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.let_go = threading.Event(), threading.Event()
        append = RowFiles.append

        def held(files: RowFiles, row_id: RowId, chunks: Sequence[DiskChunk]) -> None:
            self.reached.set()
            assert self.let_go.wait(WAIT_S)
            append(files, row_id, chunks)

        monkeypatch.setattr(RowFiles, "append", held)


def test_a_full_queue_blocks_until_the_deadline_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    limits = DiskLimits(queue_bytes=4, timeout_s=0.0)
    memory = DiskMemory(tmp_path, limits=limits, clock=VirtualClock())
    under_way = memory.put(*message((1, 0, b"abcd")))
    assert held.reached.wait(WAIT_S)
    waiting = memory.put(*message((1, 1, b"efgh")))
    with pytest.raises(DiskError, match=r"queue .*4 bytes still waited to be written after 0.0 s"):
        memory.put(*message((1, 2, b"i")))
    with pytest.raises(DiskError, match=r"close .*not all written after 0.0 s"):
        memory.close()
    held.let_go.set()
    under_way.result(WAIT_S)
    waiting.result(WAIT_S)
    wait_closed(memory)


def test_a_message_that_waited_too_long_fails_and_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, clock = Held(monkeypatch), VirtualClock()
    with DiskMemory(tmp_path, clock=clock) as memory:
        first = memory.put(*message((1, 0, bytes_of(1, 0))))
        assert held.reached.wait(WAIT_S)
        late = memory.put(*message((1, 1, bytes_of(1, 1))))
        clock.advance(61.0)
        held.let_go.set()
        first.result(WAIT_S)
        with pytest.raises(DiskError, match=r"queue .*48 bytes waited longer than 60.0 s"):
            late.result(WAIT_S)
    assert payloads(tmp_path, 1) == wanted(1, 0)


def test_messages_that_wait_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    with DiskMemory(tmp_path) as memory:
        first = memory.put(*message((1, 0, bytes_of(1, 0))))
        assert held.reached.wait(WAIT_S)
        futures = [memory.put(*message((1, position, bytes_of(1, position)))) for position in range(1, 9)]
        held.let_go.set()
        for future in (first, *futures):
            future.result(WAIT_S)
        assert memory.counters.batches == 2
    assert payloads(tmp_path, 1) == wanted(1, *range(9))


def wait_closed(memory: DiskMemory) -> None:
    for thread in threading.enumerate():
        if thread.name == "kv-disk":
            thread.join(WAIT_S)
    memory.close()


def test_a_full_disk_fails_the_message_in_words_and_the_row_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool | None
) -> None:
    with DiskMemory(tmp_path, direct=direct) as memory:
        put(memory, 1, 0)
        with monkeypatch.context() as patch:
            patch.setattr(disk_file.os, "pwritev", refuse)
            failed = memory.put(*message((1, 1, bytes_of(1, 1))))
            with pytest.raises(
                ConfigError, match=r"write .*1\.kv: No space left on device; the disk is full"
            ) as caught:
                failed.result(WAIT_S)
            assert isinstance(caught.value, DiskRefused)
        put(memory, 1, 2)
    assert payloads(tmp_path, 1) == wanted(1, 0, 2)


def refuse(*arguments: object) -> int:
    raise OSError(errno.ENOSPC, "full")


def test_a_writing_thread_that_dies_leaves_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)

    def die(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(RowFiles, "append", die)
    memory = DiskMemory(tmp_path)
    with pytest.raises(DiskError, match="the writing thread died"):
        memory.put(*message((1, 0, b"x"))).result(WAIT_S)
    wait_closed(memory)
    with pytest.raises(DiskError, match="it was closed"):
        memory.put(*message((1, 0, b"x")))


def test_a_folder_that_cannot_be_used_is_refused_with_its_path(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    for folder in (in_the_way, in_the_way / "below"):
        with pytest.raises(ConfigError, match=f"open {folder}: .*choose another one"):
            DiskMemory(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="this process may not write there"):
        DiskMemory(tmp_path / "new")


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with DiskMemory(tmp_path), pytest.raises(ConfigError, match="another process or DiskMemory writes there"):
        DiskMemory(tmp_path)
    DiskMemory(tmp_path).close()


def resident_bytes(path: Path) -> int:
    """Bytes of a file that lie in the page cache. Skips where the C library does not tell."""
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    if mincore is None:
        pytest.skip("this C library has no mincore")
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        first_byte = ctypes.c_ubyte.from_buffer(mapped)
        answer = mincore(ctypes.c_void_p(ctypes.addressof(first_byte)), ctypes.c_size_t(size), pages)
        del first_byte
    if answer != 0:
        pytest.skip("mincore refuses this file")
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_the_page_cache_does_not_keep_what_was_written_or_read(tmp_path: Path, direct: bool | None) -> None:
    if on_memory(tmp_path):
        pytest.skip("this file system lies in memory")
    chunk_bytes, limits = 1 << 20, DiskLimits(cached_bytes=2 << 20)
    with DiskMemory(tmp_path, direct=direct, limits=limits) as memory:
        for position in range(12):
            memory.put(*message((1, position, bytes(chunk_bytes)))).result(WAIT_S)
            assert resident_bytes(tmp_path / "1.kv") <= limits.cached_bytes + chunk_bytes
    row = read_row(tmp_path, RowId(1), cluster="c")
    for record in row.records:
        assert len(row.read(record)) == chunk_bytes
    assert resident_bytes(row.path) <= chunk_bytes


def on_memory(folder: Path) -> bool:
    """True when the folder's mount is a tmpfs, the file system whose files are the page cache."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    _, kind = max((len(point), kind) for point, kind in mounts if folder.is_relative_to(point))
    return kind == "tmpfs"
