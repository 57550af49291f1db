"""Rows read back from disk, after a restart as well: every chunk verified, the row proven whole before it is used.

Shape legend: L layers, C the pair (K, V), H kv heads, T positions of a row, D head_dim.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from dejavu.errors import Retryable
from dejavu.ids import Epoch, RowId
from dejavu.kv.box import Box, intersect
from dejavu.kv.chunk import ChunkCorrupt, ChunkHeader, verify, why_misfit
from dejavu.kv.coverage import Coverage
from dejavu.kv.disk_file import disk_error
from dejavu.kv.disk_index import IndexRecord, data_path, index_path, read_index
from dejavu.kv.flush import bytes_tensor
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.pool import TORCH_DTYPES
from dejavu.kv.route import Holding
from dejavu.kv.stream import LandedRow

logger = logging.getLogger(__name__)

_CACHED_BYTES: Final = 4 * 1024 * 1024


class RowIncomplete(Retryable):
    """A row on disk lacks cells; the message names its file and the first one that is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRow:
    """What one cluster has written of a row. Holds no open file; any number of threads may read."""

    row_id: RowId
    path: Path
    """The data file."""
    records: tuple[IndexRecord, ...]
    """Its chunks, in the order in which they were written; the same cells may come several times."""

    def read(self, record: IndexRecord) -> memoryview:
        """The chunk's verified bytes, in memory of their own.

        Raises ChunkCorrupt, naming file and offset, where the bytes are others or fewer; DiskError.
        """
        with _reading(self.path) as descriptor:
            return _read(self.path, descriptor, record)

    def landed(self, layout: KvLayout, holding: Holding, length: int, *, epoch: Epoch | None = None) -> LandedRow:
        """The row's positions [0, length) in the holding's layers and heads, for ``stream_in``.

        The holding need not be one that was written for: of a chunk that reaches beyond it, its part is taken. Of
        chunks with the same cells the first that verifies is used. With ``epoch``, chunks of others are left out.
        Raises RowIncomplete when cells are missing, ChunkCorrupt when they are because a chunk is not what was sealed
        (file, offset), DiskError when the file cannot be read, ValueError for a length beyond the layout's.
        """
        if not 1 <= length <= layout.max_length:
            raise ValueError(f"row {self.row_id}: length {length} is not within 1..{layout.max_length}")
        landing = _Landing(self.path, layout, holding, length)
        corrupt: list[ChunkCorrupt] = []
        with _reading(self.path) as descriptor:
            for record in self.records:
                if epoch is not None and record.header.epoch != epoch:
                    continue
                try:
                    box = landing.missing(record)
                    if box is not None:
                        landing.put(record.header, box, _read(self.path, descriptor, record))
                except ChunkCorrupt as error:
                    corrupt.append(error)
        return landing.result(self.row_id, corrupt)


def read_row(folder: Path, row_id: RowId, *, cluster: str) -> DiskRow:
    """What ``cluster`` has written of the row so far; another cluster's chunks in the same file are left out.

    Only chunks whose ``put`` has resolved are sure to be there. Raises RowIncomplete when the folder has nothing of
    the row, DiskError when its index cannot be read.
    """
    path = index_path(folder, row_id)
    try:
        index = read_index(path)
    except OSError as error:
        raise disk_error(error, path, "read") from error
    if index.torn_bytes:
        logger.warning("%s: %s bytes after %s records are unreadable", path, index.torn_bytes, len(index.records))
    records = tuple(record for record in index.records if record.cluster == cluster)
    if not records:
        others = sorted({record.cluster for record in index.records})
        raise RowIncomplete(f"{path}: nothing of row {row_id} of cluster {cluster!r}, only of {others}")
    return DiskRow(row_id=row_id, path=data_path(folder, row_id), records=records)


class _Landing:
    """Host memory that a row's chunks fill, and the account of what has come."""

    def __init__(self, path: Path, layout: KvLayout, holding: Holding, length: int) -> None:
        self._path = path
        self._layout = layout
        self._holding = holding
        self._length = length
        heads = holding.heads[1] - holding.heads[0]
        shape = (len(holding.layers), 2, heads, length, layout.head_dim)
        self._memory = torch.empty(math.prod(shape) * layout.dtype_bytes, dtype=torch.uint8)
        self._cells_LCHTD = self._memory.view(TORCH_DTYPES[layout.dtype]).view(shape)
        self._coverage = Coverage(holding.layers, holding.heads, length)

    def missing(self, record: IndexRecord) -> Box | None:
        """The chunk's cells that this row wants, None when it has all of them. Raises ChunkCorrupt for a misfit."""
        header, layout = record.header, self._layout
        misfit = why_misfit(header, layout, LayerRange(0, layout.num_layers), (0, layout.num_kv_heads))
        if misfit is not None:
            raise ChunkCorrupt(f"{self._path} at {record.offset}: {misfit}")
        layers = self._holding.layers
        shared = intersect(_box(header), ((layers.start, layers.stop), self._holding.heads, (0, self._length)))
        return (
            None
            if shared is None or self._coverage.covers(LayerRange(*shared[0]), *shared[1:], header.kinds)
            else shared
        )

    def put(self, header: ChunkHeader, box: Box, payload: memoryview) -> None:
        """The cells of ``box``, which lies in the chunk, are in their places."""
        chunk, holding = _box(header), self._holding
        kinds = slice(*header.kinds)
        shape = (
            chunk[0][1] - chunk[0][0],
            header.kinds[1] - header.kinds[0],
            *(span[1] - span[0] for span in chunk[1:]),
            self._layout.head_dim,
        )
        with torch.inference_mode():
            came = bytes_tensor(payload).view(self._cells_LCHTD.dtype).view(shape)
            target = self._cells_LCHTD[_index(box, (holding.layers.start, holding.heads[0], 0), kinds)]
            target.copy_(came[_index(box, (chunk[0][0], chunk[1][0], chunk[2][0]), slice(None))])
        self._coverage.add(LayerRange(*box[0]), *box[1:], header.kinds)

    def result(self, row_id: RowId, corrupt: list[ChunkCorrupt]) -> LandedRow:
        """The whole row. Raises ChunkCorrupt or RowIncomplete when it is not whole."""
        for error in corrupt:
            logger.warning("row %s: %s", row_id, error)
        if not self._coverage.is_complete:
            lack = f"{self._path}: row {row_id}: {self._coverage.words}"
            if corrupt:
                raise ChunkCorrupt(f"{lack}; {len(corrupt)} corrupt chunks, first: {corrupt[0]}") from corrupt[0]
            raise RowIncomplete(lack)
        return LandedRow(
            row_id=row_id,
            length=self._length,
            layers=self._holding.layers,
            heads=self._holding.heads,
            cells_LCHTD=self._cells_LCHTD,
            memory=self._memory,
        )


def _box(header: ChunkHeader) -> Box:
    return (header.layers.start, header.layers.stop), header.heads, header.positions


def _index(box: Box, first: tuple[int, int, int], kinds: slice) -> tuple[slice, ...]:
    layers, heads, positions = (slice(span[0] - start, span[1] - start) for span, start in zip(box, first, strict=True))
    return layers, kinds, heads, positions


@contextmanager
def _reading(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise disk_error(error, path, "read") from error
    try:
        yield descriptor
        # What was read once is not read again soon: the page cache is for others.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _read(path: Path, descriptor: int, record: IndexRecord) -> memoryview:
    payload = memoryview(bytearray(record.header.num_bytes))
    num_read = 0
    while num_read < payload.nbytes:
        try:
            step = os.preadv(descriptor, [payload[num_read:]], record.offset + num_read)
        except OSError as error:
            raise disk_error(error, path, "read") from error
        if step == 0:
            break
        num_read += step
    if num_read > _CACHED_BYTES or record.stop % _CACHED_BYTES < num_read:
        os.posix_fadvise(descriptor, 0, record.stop, os.POSIX_FADV_DONTNEED)
    try:
        verify(record.header, payload[:num_read])
    except ChunkCorrupt as error:
        raise ChunkCorrupt(f"{path} at {record.offset}: {error}") from error
    return payload
