"""Where ``bench_primitives.py`` moves chunks to, each with the bare medium to compare with."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy
import torch
from torch import Tensor

from dejavu.ids import Epoch, RowId
from dejavu.kv.chunk import max_chunks
from dejavu.kv.disk import DiskLimits, DiskMemory
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.primitives import Destination, LocalMemory, Region, flush_staged, pool_region, scatter
from dejavu.kv.staging import StagingRing

EPOCH, CLUSTER, DTYPE = Epoch(1), "bench", "float32"
_HEADS, _HEAD_DIM = 8, 64
POSITION_BYTES = 2 * _HEADS * _HEAD_DIM * 4
_MOST_CHUNKS = 2000
_RAW_BYTES = 4 << 20
TIMEOUT_S = 120.0


class Medium(Protocol):
    """Something that takes chunks."""

    @property
    def name(self) -> str:
        """What it is, as the table says it."""

    def raw(self, chunks: Chunks) -> tuple[int, float]:
        """Bytes and seconds of the medium alone, moving the chunks' memory, no cache warmer than for ``moved``."""

    def moved(self, chunks: Chunks, staging: StagingRing) -> tuple[int, float]:
        """Bytes and seconds of gather and flush of all chunks, until the medium has them."""

    def close(self) -> None:
        """Nothing is left of it."""


class Chunks:
    """Regions of a pool, one after the other through all its memory, so that no cache holds the next one."""

    def __init__(self, chunk_bytes: int, sample_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.num_chunks = max(2, min(_MOST_CHUNKS, sample_bytes // chunk_bytes))
        self.num_bytes = self.num_chunks * chunk_bytes
        self._positions = chunk_bytes // POSITION_BYTES
        self._per_layer = max(1, min(4096, sample_bytes // POSITION_BYTES) // self._positions)
        length = self._per_layer * self._positions
        layers = LayerRange(0, max(1, sample_bytes // (length * POSITION_BYTES)))
        layout = KvLayout(
            model_hash="bench",
            num_layers=layers.stop,
            num_kv_heads=_HEADS,
            head_dim=_HEAD_DIM,
            dtype=DTYPE,
            max_length=length,
        )
        self._pool = KvPool(layout, layers, 1)
        self._pool.cells_LCRHSD.fill_(1.5)

    @property
    def memory(self) -> Tensor:
        """All the cells as contiguous bytes."""
        return self._pool.cells_LCRHSD.view(-1).view(torch.uint8)

    def __iter__(self) -> Iterator[Region]:
        for index in range(self.num_chunks):
            layer, place = divmod(index, self._per_layer)
            layer %= len(self._pool.layers)
            positions = (place * self._positions, (place + 1) * self._positions)
            layers = LayerRange(layer, layer + 1)
            yield pool_region(self._pool, 0, RowId(layer), layers=layers, heads=(0, _HEADS), positions=positions)


def gather_and_flush(chunks: Chunks, staging: StagingRing, destination: Destination) -> None:
    """Every chunk has been flushed, as many in a message as a staging buffer holds, and all buffers are free."""
    messages = scatter(tuple(chunks), staging, cluster=CLUSTER, epoch=EPOCH, dtype=DTYPE)
    sends = [flush_staged(staged, CLUSTER, EPOCH, destination) for staged in messages]
    for sent in sends:
        sent.result(TIMEOUT_S)


def timed(work: Callable[[], object]) -> float:
    """Seconds that the work took."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class Local:
    """Memory of this process, lent to gather into."""

    name = "local, a copy of memory"

    def __init__(self, sample_bytes: int, chunk_sizes: Sequence[int]) -> None:
        self._target = torch.zeros(max(sample_bytes, 2 * max(chunk_sizes)), dtype=torch.uint8)

    def raw(self, chunks: Chunks) -> tuple[int, float]:
        """Bytes and seconds of the C library's memcpy, some MB at a time, from and to the same memory."""
        source, target, size = chunks.memory.numpy(), self._target.numpy(), max(chunks.chunk_bytes, _RAW_BYTES)

        def work() -> None:
            for begin in range(0, chunks.num_bytes, size):
                numpy.copyto(target[begin : begin + size], source[begin : begin + size])

        return chunks.num_bytes, timed(work)

    def moved(self, chunks: Chunks, staging: StagingRing) -> tuple[int, float]:
        """Bytes and seconds of gather and flush, in which every chunk has a place of its own."""
        return chunks.num_bytes, timed(lambda: self._move(chunks, staging.buffer_bytes))

    def close(self) -> None:
        """Nothing to do."""

    def _move(self, chunks: Chunks, message_bytes: int) -> None:
        begin = 0
        regions = tuple(chunks)
        # A message's header takes so many chunks; more would need a second message, and memory is lent for one.
        per_message = min(message_bytes // chunks.chunk_bytes, max_chunks(CLUSTER))
        for first in range(0, len(regions), per_message):
            place = LocalMemory(into=self._target[begin : begin + message_bytes])
            for staged in scatter(
                regions[first : first + per_message], place.lend(), cluster=CLUSTER, epoch=EPOCH, dtype=DTYPE
            ):
                flush_staged(staged, CLUSTER, EPOCH, place).result(TIMEOUT_S)
            begin += message_bytes


class Disk:
    """Files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._limits = DiskLimits()
        with DiskMemory(folder) as memory:
            self._regime = memory.regime
        self.name = f"disk, {self._regime}"

    def raw(self, chunks: Chunks) -> tuple[int, float]:
        """Bytes and seconds of sequential writes of the chunks' memory to a new file, fdatasync included."""
        path, memory = self._folder / "raw", chunks.memory
        # From its first page on, and whole pages, as O_DIRECT wants it.
        memory = memory[-memory.data_ptr() % mmap.PAGESIZE :]
        size = min(self._limits.write_bytes, memory.numel() // mmap.PAGESIZE * mmap.PAGESIZE)
        pieces = [memory[begin : begin + size].numpy().data for begin in range(0, memory.numel() - size + 1, size)]
        os.sync()  # What was deleted before is given back to the device now, not while this is measured.
        seconds = timed(lambda: self._write(path, pieces))
        path.unlink()
        return len(pieces) * size, seconds

    def moved(self, chunks: Chunks, staging: StagingRing) -> tuple[int, float]:
        """Bytes and seconds of gather and flush to new files, closing (with fdatasync) included."""
        os.sync()
        memory = DiskMemory(self._folder, limits=self._limits)

        def work() -> None:
            gather_and_flush(chunks, staging, memory)
            memory.close()

        seconds = timed(work)
        for path in (*self._folder.glob("*.kv"), *self._folder.glob("*.index")):
            path.unlink()
        return chunks.num_bytes, seconds

    def close(self) -> None:
        """Only the lock's file is left in the folder."""

    def _write(self, path: Path, pieces: Sequence[memoryview]) -> None:
        direct = os.O_DIRECT if self._regime == "O_DIRECT" else 0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | direct, 0o600)
        for index, piece in enumerate(pieces):
            os.pwrite(descriptor, piece, index * piece.nbytes)
            if not direct and (index + 1) * piece.nbytes % self._limits.cached_bytes == 0:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.fdatasync(descriptor)
        os.close(descriptor)
