"""Large payloads that start on a page are written from where they lie; whatever surrounds them stays exact."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dejavu.ids import Epoch, RowId
from dejavu.kv import disk_file
from dejavu.kv.chunk import ChunkHeader, KvMessage, encode_message, seal
from dejavu.kv.disk import DiskLimits, DiskMemory
from dejavu.kv.disk_row import read_row
from dejavu.kv.disk_run import BLOCK_BYTES, Scratch, WriteRun
from dejavu.kv.layout import LayerRange
from dejavu.kv.staging import StagingRing

LARGE = 48 * BLOCK_BYTES
WAIT_S = 30.0


@pytest.fixture(params=[None, False], ids=["found", "cached"])
def direct(request: pytest.FixtureRequest) -> bool | None:
    """The regime: what the file system takes, and the fallback."""
    return request.param


def paged(num_bytes: int, seed: int) -> memoryview:
    """Bytes that start on a page, each payload with others."""
    buffer = StagingRing(1, num_bytes).acquire(0)
    buffer.work.copy_(torch.randint(256, (num_bytes,), generator=torch.Generator().manual_seed(seed)))
    return buffer.payload(num_bytes)


def chunk(position: int, payload: memoryview) -> ChunkHeader:
    return seal(
        epoch=Epoch(1),
        row_id=RowId(1),
        layers=LayerRange(0, 1),
        heads=(0, 1),
        positions=(position, position + 1),
        dtype="float32",
        payload=payload,
    )


def put(memory: DiskMemory, position: int, payload: memoryview) -> None:
    header = encode_message(KvMessage(cluster="c", epoch=Epoch(1), chunks=(chunk(position, payload),)))
    memory.put(header, payload).result(WAIT_S)


def offsets_and_bytes(folder: Path) -> dict[int, tuple[int, bytes]]:
    row = read_row(folder, RowId(1), cluster="c")
    return {record.header.positions[0]: (record.offset, bytes(row.read(record))) for record in row.records}


@pytest.mark.parametrize("odd_bytes", [0, 1, BLOCK_BYTES - 1])
def test_large_chunks_among_small_ones_come_back_after_a_restart(
    odd_bytes: int, tmp_path: Path, direct: bool | None
) -> None:
    sizes = [100, LARGE + odd_bytes, LARGE, 7, 5000, LARGE + odd_bytes, 1, 9 * LARGE + odd_bytes]
    payloads = [paged(size, seed) for seed, size in enumerate(sizes)]
    for half in (range(0, 4), range(4, 8)):
        with DiskMemory(tmp_path, limits=DiskLimits(write_bytes=LARGE), direct=direct) as memory:
            for position in half:
                put(memory, position, payloads[position])
    found = offsets_and_bytes(tmp_path)
    assert {position: data for position, (_, data) in found.items()} == {
        position: bytes(payload) for position, payload in enumerate(payloads)
    }


def test_a_chunk_after_a_torn_record_of_a_large_one_comes_back(tmp_path: Path, direct: bool | None) -> None:
    with DiskMemory(tmp_path, direct=direct) as memory:
        put(memory, 0, paged(LARGE + 5, 0))
        put(memory, 1, paged(LARGE + 9, 1))
    index = tmp_path / "1.index"
    os.truncate(index, index.stat().st_size - 3)
    with DiskMemory(tmp_path, direct=direct) as memory:
        put(memory, 2, paged(77, 2))
        put(memory, 3, paged(LARGE, 3))
    found = {position: data for position, (_, data) in offsets_and_bytes(tmp_path).items()}
    assert found == {0: bytes(paged(LARGE + 5, 0)), 2: bytes(paged(77, 2)), 3: bytes(paged(LARGE, 3))}


def test_writes_that_end_early_are_continued(
    tmp_path: Path, direct: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwritev

    def short(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        # As a direct write does: whole blocks, then no more.
        return write(descriptor, [views[0][: 3 * BLOCK_BYTES]], offset)

    payloads = [paged(LARGE + 1, 0), paged(10, 1), paged(2 * LARGE, 2)]
    with monkeypatch.context() as patch, DiskMemory(tmp_path, direct=direct) as memory:
        patch.setattr(disk_file.os, "pwritev", short)
        for position, payload in enumerate(payloads):
            put(memory, position, payload)
    assert [data for _, data in offsets_and_bytes(tmp_path).values()] == [bytes(payload) for payload in payloads]


class Written:
    """A file in memory, and what was handed to it."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self.calls: list[tuple[int, list[int]]] = []

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        self.calls.append((offset, [view.nbytes for view in views]))
        data = b"".join(views)
        self.bytes.extend(bytes(max(0, offset + len(data) - len(self.bytes))))
        self.bytes[offset : offset + len(data)] = data


def test_only_the_part_beyond_the_last_whole_block_of_a_large_piece_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    fill = Scratch.fill

    def counted(scratch: Scratch, offset: int, piece: memoryview) -> None:
        copied.append(piece.nbytes)
        fill(scratch, offset, piece)

    monkeypatch.setattr(Scratch, "fill", counted)
    written, piece = Written(), paged(LARGE + 3, 0)
    run = WriteRun(Scratch(LARGE), written.write, end=10, tail=b"0123456789", align=BLOCK_BYTES)
    assert run.add(piece) == BLOCK_BYTES
    end, tail = run.finish()
    assert (end, tail) == (BLOCK_BYTES + LARGE + 3, bytes(piece[-3:]))
    assert sum(copied) == 10 + 3
    # The unfinished block before it is in the file already.
    assert written.calls == [(BLOCK_BYTES, [LARGE, BLOCK_BYTES])]


def test_a_large_piece_that_starts_amid_a_page_is_packed_like_a_small_one() -> None:
    written, piece = Written(), paged(LARGE + 1, 0)[1:]
    run = WriteRun(Scratch(LARGE), written.write, end=10, tail=b"0123456789", align=BLOCK_BYTES)
    assert run.add(piece) == 10
    end, tail = run.finish()
    assert bytes(written.bytes[:end]) == b"0123456789" + bytes(piece)
    assert (end, tail) == (LARGE + 10, bytes(piece[-10:]))


def test_pieces_in_any_order_lie_where_the_run_says() -> None:
    generator = torch.Generator().manual_seed(1)
    written, end, tail = Written(), 0, b""
    placed: list[tuple[int, memoryview]] = []
    for seed in range(30):
        run = WriteRun(Scratch(2 * BLOCK_BYTES), written.write, end=end, tail=tail, align=BLOCK_BYTES)
        for large, extra in torch.randint(2, (3, 2), generator=generator).tolist():
            piece = paged(large * LARGE + extra * 5001 + 1, seed)
            placed.append((run.add(piece), piece))
        end, tail = run.finish()
        assert tail == bytes(written.bytes[end - end % BLOCK_BYTES : end])
    for offset, piece in placed:
        assert bytes(written.bytes[offset : offset + piece.nbytes]) == bytes(piece)
