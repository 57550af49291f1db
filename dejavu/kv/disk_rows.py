"""The files of the rows that are being written: opened when needed, a bounded number at a time, and dropped."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dejavu.ids import RowId
from dejavu.kv.chunk import ChunkHeader
from dejavu.kv.disk_file import AppendFile, DiskError, DiskRefused, disk_error
from dejavu.kv.disk_index import IndexRecord, data_path, encode_record, index_path, read_index
from dejavu.kv.disk_run import Scratch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskChunk:
    """A chunk on its way to disk: whose it is, what it is, its bytes."""

    cluster: str
    header: ChunkHeader
    payload: memoryview


@dataclass(frozen=True, slots=True)
class _OpenRow:
    data: AppendFile
    index: AppendFile

    @property
    def files(self) -> tuple[AppendFile, AppendFile]:
        # The data first: a record on the device should not outlive the bytes that it speaks of.
        return self.data, self.index

    @property
    def unsettled_bytes(self) -> int:
        return self.data.unsettled_bytes + self.index.unsettled_bytes


class RowFiles:
    """Appends chunks to the files of their rows; one thread.

    At most ``max_open_rows`` rows have open files, and at most about ``cached_bytes`` of what was written lie in the
    page cache (all of it is the index's where ``direct`` is true).
    """

    def __init__(
        self, folder: Path, *, direct: bool, scratch_bytes: int, max_open_rows: int, cached_bytes: int
    ) -> None:
        self._folder = folder
        self._direct = direct
        self._scratch = Scratch(scratch_bytes)
        self._max_open_rows = max_open_rows
        self._cached_bytes = cached_bytes
        self._open: OrderedDict[RowId, _OpenRow] = OrderedDict()
        self._unsettled_bytes = 0

    @property
    def num_open(self) -> int:
        """Rows with open files."""
        return len(self._open)

    def append(self, row_id: RowId, chunks: Sequence[DiskChunk]) -> None:
        """The chunks' bytes are written behind the row's others, and its index names them. Blocks for the writes.

        Raises DiskRefused or DiskError; the index then names none of them.
        """
        row = self._row(row_id)
        unsettled_before = row.unsettled_bytes
        offsets = row.data.append([chunk.payload for chunk in chunks])
        records = bytearray()
        for chunk, offset in zip(chunks, offsets, strict=True):
            records += encode_record(IndexRecord(cluster=chunk.cluster, header=chunk.header, offset=offset))
        row.index.append([memoryview(records)])
        # Counted on: a sum over all open files at every append costs as much as the append.
        self._unsettled_bytes += row.unsettled_bytes - unsettled_before
        if self._unsettled_bytes > self._cached_bytes:
            self._settle()

    def drop(self, row_id: RowId) -> None:
        """The row's files are gone. Idempotent."""
        row = self._open.pop(row_id, None)
        if row is not None:
            self._unsettled_bytes -= row.unsettled_bytes
            for file in row.files:
                file.discard()
        # The index first: a row without an index is no row, whatever happens in between.
        for path in (index_path(self._folder, row_id), data_path(self._folder, row_id)):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise disk_error(error, path, "drop") from error

    def close(self) -> None:
        """The device has everything and no file is open. Raises the first error after all are closed."""
        errors = [error for row_id in tuple(self._open) for error in self._close(row_id)]
        if errors:
            raise errors[0]

    def _row(self, row_id: RowId) -> _OpenRow:
        row = self._open.get(row_id)
        if row is None:
            while len(self._open) >= self._max_open_rows:
                for error in self._close(next(iter(self._open))):
                    raise error
            row = self._open[row_id] = self._open_row(row_id)
        self._open.move_to_end(row_id)
        return row

    def _open_row(self, row_id: RowId) -> _OpenRow:
        path = index_path(self._folder, row_id)
        try:
            index = read_index(path)
        except OSError as error:
            raise disk_error(error, path, "open") from error
        if index.torn_bytes:
            logger.warning("%s: %s bytes after %s records are cut off", path, index.torn_bytes, len(index.records))
        data = AppendFile(data_path(self._folder, row_id), index.data_end, self._scratch, direct=self._direct)
        try:
            return _OpenRow(data, AppendFile(path, index.good_bytes, self._scratch, direct=False))
        except (DiskError, DiskRefused):
            data.discard()
            raise

    def _close(self, row_id: RowId) -> list[DiskError | DiskRefused]:
        errors: list[DiskError | DiskRefused] = []
        row = self._open.pop(row_id)
        self._unsettled_bytes -= row.unsettled_bytes
        for file in row.files:
            try:
                file.close()
            except (DiskError, DiskRefused) as error:
                errors.append(error)
        return errors

    def _settle(self) -> None:
        self._unsettled_bytes = 0
        for row in self._open.values():
            for file in row.files:
                file.settle()
