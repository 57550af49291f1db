"""Where ``bench_primitives.py`` moves chunks to, each with the bare medium to compare with."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import torch

from dejavu.ids import Epoch, RowId
from dejavu.kv.disk import DiskLimits, DiskMemory
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.primitives import Destination, LocalMemory, Region, flush_staged, pool_region, scatter
from dejavu.kv.staging import StagingRing

EPOCH, CLUSTER, DTYPE = Epoch(1), "bench", "float32"
_HEADS, _HEAD_DIM = 8, 64
POSITION_BYTES = 2 * _HEADS * _HEAD_DIM * 4
_MOST_CHUNKS = 2000
TIMEOUT_S = 120.0


class Medium(Protocol):
    """Something that takes chunks."""

    @property
    def name(self) -> str:
        """What it is, as the table says it."""

    def raw(self) -> tuple[int, float]:
        """Bytes and seconds of the medium alone, moving large pieces."""

    def moved(self, chunks: Chunks, staging: StagingRing) -> float:
        """Seconds of gather and flush of all chunks, until the medium has them."""

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

    def __iter__(self) -> Iterator[Region]:
        for index in range(self.num_chunks):
            layer, place = divmod(index, self._per_layer)
            layer %= len(self._pool.layers)
            positions = (place * self._positions, (place + 1) * self._positions)
            layers = LayerRange(layer, layer + 1)
            yield pool_region(self._pool, 0, RowId(layer), layers=layers, heads=(0, _HEADS), positions=positions)


def gather_and_flush(chunks: Chunks, staging: StagingRing, destination: Callable[[int], Destination]) -> None:
    """Every chunk has been flushed to ``destination(index)`` and its staging buffer is free."""
    sends: list[Future[None]] = []
    for index, region in enumerate(chunks):
        for staged in scatter([region], staging, cluster=CLUSTER, epoch=EPOCH, dtype=DTYPE):
            sends.append(flush_staged(staged, CLUSTER, EPOCH, destination(index)))
    for sent in sends:
        sent.result(TIMEOUT_S)


def timed(work: Callable[[], object]) -> float:
    """Seconds that the work took."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class Local:
    """Memory of this process."""

    name = "local, a copy of memory"

    def __init__(self, sample_bytes: int, chunk_sizes: Sequence[int]) -> None:
        self._source = torch.ones(max(sample_bytes, 2 * max(chunk_sizes)), dtype=torch.uint8)
        self._target = torch.zeros_like(self._source)

    def raw(self) -> tuple[int, float]:
        """Bytes and seconds of one plain copy."""
        return self._source.nbytes, timed(lambda: self._target.copy_(self._source))

    def moved(self, chunks: Chunks, staging: StagingRing) -> float:
        """Seconds of gather and flush."""
        size = staging.buffer_bytes
        places = self._target.nbytes // size
        return timed(
            lambda: gather_and_flush(
                chunks, staging, lambda index: LocalMemory(into=self._target[index % places * size :][:size])
            )
        )

    def close(self) -> None:
        """Nothing to do."""


class Disk:
    """Files of one folder."""

    def __init__(self, folder: Path, sample_bytes: int) -> None:
        self._folder, self._sample_bytes = folder, sample_bytes
        self._limits = DiskLimits()
        with DiskMemory(folder) as memory:
            self._regime = memory.regime
        self._buffer = mmap.mmap(-1, self._limits.write_bytes)
        self._buffer.write(b"1" * self._limits.write_bytes)
        self.name = f"disk, {self._regime}"

    def raw(self) -> tuple[int, float]:
        """Bytes and seconds of sequential writes to a new file, fdatasync included."""
        path = self._folder / "raw"
        num_writes = max(1, self._sample_bytes // self._limits.write_bytes)
        seconds = timed(lambda: self._write(path, num_writes))
        path.unlink()
        return num_writes * self._limits.write_bytes, seconds

    def moved(self, chunks: Chunks, staging: StagingRing) -> float:
        """Seconds of gather and flush to new files, closing (with fdatasync) included."""
        memory = DiskMemory(self._folder, limits=self._limits)

        def work() -> None:
            gather_and_flush(chunks, staging, lambda _: memory)
            memory.close()

        seconds = timed(work)
        for path in (*self._folder.glob("*.kv"), *self._folder.glob("*.index")):
            path.unlink()
        return seconds

    def close(self) -> None:
        """Only the lock's file is left in the folder."""

    def _write(self, path: Path, num_writes: int) -> None:
        direct = os.O_DIRECT if self._regime == "O_DIRECT" else 0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | direct, 0o600)
        for index in range(num_writes):
            os.pwrite(descriptor, self._buffer, index * len(self._buffer))
            if not direct and (index + 1) * len(self._buffer) % self._limits.cached_bytes == 0:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.fdatasync(descriptor)
        os.close(descriptor)
