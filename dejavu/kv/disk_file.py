"""A file that only grows, written past the page cache, so that a long run does not fill memory with what it wrote.

Where the file system takes O_DIRECT, blocks go from an aligned buffer straight to the device. Elsewhere they go through
the page cache, and ``settle`` has them written and dropped; its caller does so every few megabytes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from dejavu.errors import ConfigError, Retryable
from dejavu.kv.disk_run import BLOCK_BYTES, Scratch, WriteRun

logger = logging.getLogger(__name__)

_MOST_VIEWS: Final = 512
"""In one write; Linux takes 1024."""

_THE_USERS_TO_MEND: Final = {
    errno.ENOSPC: "the disk is full: free some space, drop rows or choose another folder",
    errno.EDQUOT: "the quota is used up: free some space, drop rows or choose another folder",
    errno.EFBIG: "the file would be larger than the file system or the process's limit takes",
    errno.EACCES: "this process may not write there: choose another folder",
    errno.EPERM: "this process may not write there: choose another folder",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.ENOTDIR: "a part of the path is no folder: choose another one",
    errno.EEXIST: "it is no folder: choose another one",
}


class DiskError(Retryable):
    """A disk transfer failed. The message names path and phase (open, queue, write, read, drop, close)."""

    def __init__(self, message: str, *, path: Path, phase: str) -> None:
        super().__init__(f"{phase} {path}: {message}")
        self.path = path
        self.phase = phase


class DiskRefused(ConfigError):
    """The folder cannot take the KV, and the user can mend it: full, read-only, not writable, in use."""

    def __init__(self, message: str, *, path: Path, phase: str) -> None:
        super().__init__(f"{phase} {path}: {message}")
        self.path = path
        self.phase = phase


def disk_error(error: OSError, path: Path, phase: str) -> DiskError | DiskRefused:
    """The operating system's error in our words: DiskRefused where the user can mend it, else DiskError."""
    remedy = _THE_USERS_TO_MEND.get(error.errno or 0)
    reason = os.strerror(error.errno) if error.errno else str(error)
    if remedy is not None:
        return DiskRefused(f"{reason}; {remedy}", path=path, phase=phase)
    return DiskError(reason, path=path, phase=phase)


class AppendFile:
    """A file with a logical end at which bytes are appended; one thread. What lies beyond that end means nothing.

    Raises DiskRefused or DiskError when it cannot be opened.
    """

    def __init__(self, path: Path, end: int, scratch: Scratch, *, direct: bool) -> None:
        self._path = path
        self._end = end
        self._scratch = scratch
        self._align = BLOCK_BYTES if direct else 1
        self._unsettled_bytes = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise disk_error(error, path, "open") from error
        try:
            self._tail = self._read_tail()
            if not direct:
                os.ftruncate(self._descriptor, end)
        except OSError as error:
            os.close(self._descriptor)
            raise disk_error(error, path, "open") from error

    @property
    def unsettled_bytes(self) -> int:
        """Bytes that may lie in the page cache because of this file."""
        return self._unsettled_bytes

    def append(self, pieces: Sequence[memoryview]) -> tuple[int, ...]:
        """The pieces lie in the file, in order; returns the offset of each. Blocks for the writes.

        When it raises DiskRefused or DiskError, the file's logical end is where it was.
        """
        run = WriteRun(self._scratch, self._write, end=self._end, tail=self._tail, align=self._align)
        try:
            if os.fstat(self._descriptor).st_nlink == 0:
                # Nobody could find what is written to a file without a name.
                raise FileNotFoundError(errno.ENOENT, "its name is gone")
            offsets = tuple(run.add(piece) for piece in pieces)
            self._end, self._tail = run.finish()
        except OSError as error:
            if self._align == 1:
                # Else a part of the failed write could be read as a record behind the next one. Where even this fails,
                # such a record's chunk fails its checksum.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._end)
            raise disk_error(error, self._path, "write") from error
        return offsets

    def settle(self) -> None:
        """Nothing of this file needs the page cache any more. Blocks until the device has it."""
        if self._unsettled_bytes == 0:
            return
        try:
            # The kernel drops clean pages only.
            os.fdatasync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise disk_error(error, self._path, "write") from error
        self._unsettled_bytes = 0

    def close(self) -> None:
        """The device has everything and the descriptor is given back, even when this raises."""
        try:
            if self._unsettled_bytes:
                self.settle()
            else:
                os.fdatasync(self._descriptor)
        except OSError as error:
            raise disk_error(error, self._path, "close") from error
        finally:
            os.close(self._descriptor)

    def discard(self) -> None:
        """The descriptor is given back; the file is about to go, so nothing is written."""
        os.close(self._descriptor)

    def _write(self, views: Sequence[memoryview], position: int) -> None:
        for group in _groups(views, self._scratch.num_bytes):
            position = self._write_group(group, position)

    def _write_group(self, views: Sequence[memoryview], position: int) -> int:
        while views:
            step = os.pwritev(self._descriptor, views, position)
            # A short direct write may end amid a block, where the next one could not begin.
            step -= step % self._align
            if step == 0:
                raise OSError(errno.ENOSPC, f"nothing of {sum(view.nbytes for view in views)} bytes was taken")
            position += step
            views = _behind(views, step)
            if self._align == 1:
                self._unsettled_bytes += step
        return position

    def _read_tail(self) -> bytes:
        num_bytes = self._end % self._align
        if num_bytes == 0:
            return b""
        block = self._scratch.array[:BLOCK_BYTES]
        block[:] = 0
        num_read = os.preadv(self._descriptor, [block.data], self._end - num_bytes)
        if num_read < num_bytes:
            logger.warning("%s ends before its index says: %s bytes are missing", self._path, num_bytes - num_read)
        return block[:num_bytes].tobytes()


def takes_direct(folder: Path) -> bool:
    """True when files of this folder can be written with O_DIRECT. Raises DiskRefused where none can be written."""
    probe = folder / f"probe-{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise disk_error(error, folder, "open") from error
    try:
        os.write(descriptor, b"\0")
        return _writes_direct(probe)
    except OSError as error:
        raise disk_error(error, folder, "open") from error
    finally:
        os.close(descriptor)
        probe.unlink()


def _writes_direct(path: Path) -> bool:
    try:
        file = AppendFile(path, 0, Scratch(BLOCK_BYTES), direct=True)
    except DiskError as error:
        logger.info("O_DIRECT is not taken: %s", error)
        return False
    try:
        file.append([memoryview(bytes(BLOCK_BYTES))])
    except DiskError as error:
        logger.info("O_DIRECT is not taken: %s", error)
        return False
    finally:
        file.discard()
    return True


def _groups(views: Sequence[memoryview], most_bytes: int) -> Iterator[list[memoryview]]:
    """The same bytes in order, as lists of at most ``most_bytes`` (a multiple of a block) each."""
    group: list[memoryview] = []
    room = most_bytes
    for view in views:
        while view.nbytes:
            if room == 0 or len(group) == _MOST_VIEWS:
                yield group
                group, room = [], most_bytes
            part = view[:room]
            group.append(part)
            room -= part.nbytes
            view = view[part.nbytes :]
    if group:
        yield group


def _behind(views: Sequence[memoryview], num_bytes: int) -> Sequence[memoryview]:
    """The views without their first bytes."""
    for index, view in enumerate(views):
        if num_bytes < view.nbytes:
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= view.nbytes
    return []
