"""A file that only grows, written past the page cache, so that a long run does not fill memory with what it wrote.

Where the file system takes O_DIRECT, blocks go from an aligned buffer straight to the device. Elsewhere they go through
the page cache, and ``settle`` has them written and dropped; its caller does so every few megabytes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy

from dejavu.errors import ConfigError, Retryable

logger = logging.getLogger(__name__)

BLOCK_BYTES: Final = 4096
"""Address, length and offset of every O_DIRECT write are multiples of it: the largest logical block of common disks."""

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


class Scratch:
    """A page-aligned buffer in which a write is put together. ``num_bytes`` is rounded up to whole blocks."""

    def __init__(self, num_bytes: int) -> None:
        if num_bytes < 1:
            raise ValueError(f"a scratch buffer of {num_bytes} bytes holds nothing")
        self.num_bytes = _round_up(num_bytes, BLOCK_BYTES)
        # An anonymous mapping starts on a page; written at once, because a fresh page costs several times a copy.
        self.array = numpy.frombuffer(mmap.mmap(-1, self.num_bytes), dtype=numpy.uint8)
        self.array[:] = 0

    def fill(self, offset: int, piece: memoryview) -> None:
        """The piece's bytes lie at ``offset``; the interpreter's lock is free while they are copied."""
        numpy.copyto(self.array[offset : offset + piece.nbytes], numpy.frombuffer(piece, dtype=numpy.uint8))


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

    def append(self, pieces: Sequence[memoryview]) -> int:
        """The pieces lie in the file one after the other; returns the offset of the first. Blocks for the write.

        When it raises DiskRefused or DiskError, the file's logical end is where it was.
        """
        first = self._end
        try:
            self._append(pieces)
        except OSError as error:
            if self._align == 1:
                # Else a part of the failed write could be read as a record behind the next one. Where even this fails,
                # such a record's chunk fails its checksum.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, first)
            raise disk_error(error, self._path, "write") from error
        return first

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
            self.settle()
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise disk_error(error, self._path, "close") from error
        finally:
            os.close(self._descriptor)

    def discard(self) -> None:
        """The descriptor is given back; the file is about to go, so nothing is written."""
        os.close(self._descriptor)

    def _append(self, pieces: Sequence[memoryview]) -> None:
        # The last block is not full: it is written again, with what follows.
        filled = len(self._tail)
        position = self._end - filled
        self._scratch.fill(0, memoryview(self._tail))
        for piece in pieces:
            taken = 0
            while taken < piece.nbytes:
                step = min(piece.nbytes - taken, self._scratch.num_bytes - filled)
                self._scratch.fill(filled, piece[taken : taken + step])
                taken += step
                filled += step
                if filled == self._scratch.num_bytes:
                    self._write(filled, position)
                    position += filled
                    filled = 0
        padded = _round_up(filled, self._align)
        self._scratch.array[filled:padded] = 0
        self._write(padded, position)
        self._tail = self._scratch.array[filled - filled % self._align : filled].tobytes()
        self._end = position + filled

    def _write(self, num_bytes: int, position: int) -> None:
        written = 0
        while written < num_bytes:
            step = os.pwrite(self._descriptor, self._scratch.array[written:num_bytes].data, position + written)
            # A short direct write may end amid a block, where the next one could not begin.
            step -= step % self._align
            if step == 0:
                raise OSError(errno.ENOSPC, f"{written} of {num_bytes} bytes were taken")
            written += step
        if self._align == 1:
            self._unsettled_bytes += num_bytes

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


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
