"""Disk as a destination of level 1: chunks are appended to a file for each row and can be read back after a restart.

A thread of its own writes, so that neither the computation nor the streamer waits for the disk; what it writes does
not stay in the page cache (disk_file.py). ``read_row`` (disk_row.py) is the way back.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from dejavu.clock import Clock, SystemClock
from dejavu.ids import RowId
from dejavu.kv.chunk import decode_message
from dejavu.kv.disk_file import DiskError, DiskRefused, disk_error, takes_direct
from dejavu.kv.disk_queue import DiskQueue, Drop, Job, Write
from dejavu.kv.disk_rows import DiskChunk, RowFiles
from dejavu.kv.tombstones import Tombstones


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLimits:
    """What a DiskMemory may hold at a time, and how long anything may wait."""

    queue_bytes: int = 64 * 1024 * 1024
    """Payloads that wait to be written; beyond it ``put`` blocks. A larger message may wait alone."""
    write_bytes: int = 4 * 1024 * 1024
    """The largest single write; messages that wait are written together up to so much."""
    cached_bytes: int = 16 * 1024 * 1024
    """Of what was written, about so much may lie in the page cache."""
    open_rows: int = 64
    """Rows with open files, two each; the one that was written longest ago is closed for the next."""
    num_tombstones: int = 65536
    """Dropped rows that are remembered one by one, so that their late chunks make no new files."""
    timeout_s: float = 60.0
    """A message that has waited so long fails, and ``put`` and ``close`` wait no longer."""

    def __post_init__(self) -> None:
        for name in ("queue_bytes", "write_bytes", "cached_bytes", "open_rows", "num_tombstones"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")


@dataclass(slots=True, kw_only=True)
class DiskCounters:
    """Since the start. ``stale`` are chunks of dropped rows, which are not written."""

    chunks: int = 0
    bytes_written: int = 0
    batches: int = 0
    """How often the thread has written; several messages may be one batch."""
    stale: int = 0


class DiskMemory:
    """A folder that takes KV messages, of any rows in any order. Any thread; one writer for each folder.

    ``direct`` is found out unless it is given: True writes with O_DIRECT, False through a bounded part of the page
    cache. Raises DiskRefused (a ConfigError) when the folder cannot be made or written, or has another writer.
    """

    def __init__(
        self, folder: Path, *, limits: DiskLimits | None = None, direct: bool | None = None, clock: Clock | None = None
    ) -> None:
        self._folder = folder
        self._limits = limits or DiskLimits()
        self._clock = clock or SystemClock()
        self._lock_descriptor = _claim(folder)
        try:
            self._direct = takes_direct(folder) if direct is None else direct
            self._files = RowFiles(
                folder,
                direct=self._direct,
                scratch_bytes=self._limits.write_bytes,
                max_open_rows=self._limits.open_rows,
                cached_bytes=self._limits.cached_bytes,
            )
        except BaseException:
            os.close(self._lock_descriptor)
            raise
        self._queue = DiskQueue(folder, self._limits.queue_bytes)
        self._under_way: tuple[Job, ...] = ()
        self._dropped = Tombstones(self._limits.num_tombstones)
        self._counters = DiskCounters()
        self._counters_lock = threading.Lock()
        self._close_error: DiskError | DiskRefused | None = None
        # A daemon, because a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    @property
    def folder(self) -> Path:
        """Where the rows' files are."""
        return self._folder

    @property
    def regime(self) -> str:
        """How the page cache is spared."""
        return "O_DIRECT" if self._direct else "fdatasync and POSIX_FADV_DONTNEED"

    @property
    def counters(self) -> DiskCounters:
        """A copy of the counters."""
        with self._counters_lock:
            return replace(self._counters)

    def put(self, header: bytes, payload: memoryview) -> Future[None]:
        """The message's chunks will be appended to their rows' files and indexes; ``header`` is a KvMessage's.

        The future resolves when the operating system has them: ``read_row`` finds them, they outlive this process (and
        after ``close`` a loss of power), and the payload's memory may be reused. It fails with DiskRefused where the
        user can mend it (a full disk), else with DiskError. Blocks while too much is queued; raises DiskError when that
        takes longer than ``timeout_s``, ChunkCorrupt for a header that is none, ValueError for a payload that is longer
        or shorter than announced.
        """
        message = decode_message(header)
        if message.num_bytes != payload.nbytes:
            raise ValueError(f"a payload of {payload.nbytes} bytes, its header announces {message.num_bytes}")
        deadline_s = self._clock.monotonic() + self._limits.timeout_s
        job = Write(message=message, payload=payload, deadline_s=deadline_s)
        self._queue.add(job, self._limits.timeout_s)
        return job.done

    def drop(self, row_id: RowId) -> Future[None]:
        """The row's files will be gone when the future resolves, and chunks of it that come later are not written."""
        job = Drop(row_id=row_id)
        self._queue.add(job, self._limits.timeout_s)
        return job.done

    def close(self) -> None:
        """Everything that was put is on the device, and thread, open files and the folder's lock are gone. Idempotent.

        Raises DiskError when that takes longer than ``timeout_s``, and what went wrong with the last files.
        """
        self._queue.close()
        self._thread.join(self._limits.timeout_s)
        if self._thread.is_alive():
            raise DiskError(f"not all written after {self._limits.timeout_s} s", path=self._folder, phase="close")
        if self._close_error is not None:
            raise self._close_error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while jobs := self._queue.take(self._limits.write_bytes):
                self._under_way = jobs
                self._do(jobs)
        finally:
            self._end()

    def _do(self, jobs: Sequence[Job]) -> None:
        writes: list[Write] = []
        for job in jobs:
            match job:
                case Drop():
                    self._do_drop(job)
                case Write():
                    writes.append(job)
        if writes:
            self._do_writes(writes)

    def _do_drop(self, job: Drop) -> None:
        self._dropped.add(job.row_id)
        try:
            self._files.drop(job.row_id)
        except (DiskError, DiskRefused) as error:
            job.done.set_exception(error)
        else:
            job.done.set_result(None)

    def _do_writes(self, writes: Sequence[Write]) -> None:
        failed: dict[Write, DiskError | DiskRefused] = {}
        by_row: dict[RowId, list[tuple[Write, DiskChunk]]] = {}
        for job in writes:
            if self._clock.monotonic() > job.deadline_s:
                message = f"{job.payload.nbytes} bytes waited longer than {self._limits.timeout_s} s"
                failed[job] = DiskError(message, path=self._folder, phase="queue")
                continue
            for chunk in _chunks(job):
                by_row.setdefault(chunk.header.row_id, []).append((job, chunk))
        for row_id, chunks in by_row.items():
            try:
                self._append(row_id, [chunk for _, chunk in chunks])
            except (DiskError, DiskRefused) as error:
                failed.update((job, error) for job, _ in chunks)
        with self._counters_lock:
            self._counters.batches += 1
        for job in writes:
            if job in failed:
                job.done.set_exception(failed[job])
            else:
                job.done.set_result(None)

    def _append(self, row_id: RowId, chunks: Sequence[DiskChunk]) -> None:
        stale = row_id in self._dropped
        if not stale:
            self._files.append(row_id, chunks)
        with self._counters_lock:
            if stale:
                self._counters.stale += len(chunks)
            else:
                self._counters.chunks += len(chunks)
                self._counters.bytes_written += sum(chunk.header.num_bytes for chunk in chunks)

    def _end(self) -> None:
        # Jobs are left only when the thread has died of something that nobody foresaw; nobody may wait for it then.
        self._queue.close()
        left = self._under_way
        while left:
            for job in left:
                if not job.done.done():
                    job.done.set_exception(DiskError("the writing thread died", path=self._folder, phase="write"))
            left = self._queue.take(self._limits.write_bytes)
        try:
            self._files.close()
        except (DiskError, DiskRefused) as error:
            self._close_error = error
        finally:
            os.close(self._lock_descriptor)


def _chunks(job: Write) -> list[DiskChunk]:
    chunks: list[DiskChunk] = []
    offset = 0
    for header in job.message.chunks:
        payload = job.payload[offset : offset + header.num_bytes]
        chunks.append(DiskChunk(cluster=job.message.cluster, header=header, payload=payload))
        offset += header.num_bytes
    return chunks


def _claim(folder: Path) -> int:
    """The descriptor of a lock that goes with this process. Raises DiskRefused."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise disk_error(error, folder, "open") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        reason = "another process or DiskMemory writes there: give each a folder of its own"
        raise DiskRefused(f"{reason} ({os.strerror(error.errno or 0)})", path=folder, phase="open") from error
    return descriptor
