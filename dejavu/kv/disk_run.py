"""What one append writes, put together from two kinds of memory: the caller's own, and a scratch buffer.

A large payload that starts on a page needs no copy: its whole blocks leave from where they lie, and begin in the file
on a block of their own. Everything else is packed, byte after byte, into the scratch buffer.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy

BLOCK_BYTES: Final = 4096
"""Address, length and offset of every O_DIRECT write are multiples of it: the largest logical block of common disks."""

_LEND_BYTES: Final = 128 * 1024
"""A smaller payload is packed: the copy costs less than the part of a block that lies empty before the next one."""

WriteAll: TypeAlias = Callable[[Sequence[memoryview], int], None]
"""Writes views one after the other at an offset of the file, or raises OSError."""


class Scratch:
    """A page-aligned buffer in which a write is put together. ``num_bytes`` is rounded up to whole blocks."""

    def __init__(self, num_bytes: int) -> None:
        if num_bytes < 1:
            raise ValueError(f"a scratch buffer of {num_bytes} bytes holds nothing")
        self.num_bytes = round_up(num_bytes, BLOCK_BYTES)
        # An anonymous mapping starts on a page; written at once, because a fresh page costs several times a copy.
        self.array = numpy.frombuffer(mmap.mmap(-1, self.num_bytes), dtype=numpy.uint8)
        self.array[:] = 0

    def fill(self, offset: int, piece: memoryview) -> None:
        """The piece's bytes lie at ``offset``; the interpreter's lock is free while they are copied."""
        numpy.copyto(self.array[offset : offset + piece.nbytes], numpy.frombuffer(piece, dtype=numpy.uint8))


class WriteRun:
    """Pieces of one append, in order, from ``end`` of the file on, whose unfinished block begins with ``tail``.

    ``align`` is what addresses, lengths and offsets of writes are multiples of; 1 where any will do. Nobody may touch
    a lent piece before ``finish`` has returned.
    """

    def __init__(self, scratch: Scratch, write: WriteAll, *, end: int, tail: bytes, align: int) -> None:
        self._scratch = scratch
        self._write = write
        self._align = align
        self._views: list[memoryview] = []
        self._start = end - len(tail)
        """Where in the file the first of the views goes, or the scratch bytes when there are none."""
        self._stop = self._start
        """Where in the file the scratch bytes [begin, filled) go."""
        self._begin, self._filled = 0, len(tail)
        self._num_old = len(tail)
        scratch.fill(0, memoryview(tail))

    def add(self, piece: memoryview) -> int:
        """The piece is a part of the run; returns its offset in the file. Raises OSError of a write."""
        if piece.nbytes >= _LEND_BYTES and _address(piece) % self._align == 0:
            return self._lend(piece)
        return self._pack(piece)

    def finish(self) -> tuple[int, bytes]:
        """All is written. Returns the file's new end and the bytes of its unfinished block. Raises OSError."""
        end = self._end
        tail = self._scratch.array[self._filled - end % self._align : self._filled].tobytes()
        self._close_block()
        self._flush()
        return end, tail

    @property
    def _end(self) -> int:
        return self._stop + self._filled - self._begin

    def _pack(self, piece: memoryview) -> int:
        offset = self._end
        taken = 0
        while taken < piece.nbytes:
            if self._filled == self._scratch.num_bytes:
                self._close_block()
                self._flush()
            step = min(piece.nbytes - taken, self._scratch.num_bytes - self._filled)
            self._scratch.fill(self._filled, piece[taken : taken + step])
            taken += step
            self._filled += step
        return offset

    def _lend(self, piece: memoryview) -> int:
        self._close_block()
        if self._begin == self._scratch.num_bytes:
            self._flush()
        offset = self._stop
        whole = piece.nbytes - piece.nbytes % self._align
        self._views.append(piece[:whole])
        self._stop += whole
        self._pack(piece[whole:])
        return offset

    def _close_block(self) -> None:
        """What was packed is a view of whole blocks, and the next byte begins a block."""
        padded = round_up(self._filled, self._align)
        if self._filled - self._begin > self._num_old:
            self._scratch.array[self._filled : padded] = 0
            self._views.append(self._scratch.array[self._begin : padded].data)
        elif not self._views:
            # Only what the file has already: the block need not be written again.
            self._start += padded - self._begin
        self._stop += padded - self._begin
        self._begin = self._filled = padded
        self._num_old = 0

    def _flush(self) -> None:
        """Everything in the views is written; the scratch buffer, which holds no open block, is empty."""
        if self._views:
            self._write(self._views, self._start)
        self._views = []
        self._start = self._stop
        self._begin = self._filled = 0


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not less than the number."""
    return -(-number // multiple) * multiple


def _address(piece: memoryview) -> int:
    return int(numpy.frombuffer(piece, dtype=numpy.uint8).ctypes.data)
