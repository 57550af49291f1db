"""Chunks that came before their row was expected: kept as copies, within a byte bound, oldest row dropped first."""

from __future__ import annotations

from dejavu.ids import RowId
from dejavu.kv.chunk import ChunkHeader


class EarlyChunks:
    """Copies of chunks by row. Not threadsafe: its owner has a lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: dict[RowId, list[tuple[ChunkHeader, memoryview]]] = {}
        self._num_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self._num_bytes

    def keep(self, header: ChunkHeader, payload: memoryview) -> int:
        """The chunk waits for its row; returns how many chunks were dropped for it, itself included if too large.

        The row that has waited longest goes first: one that nobody ever expects cannot block the place for ever.
        """
        if header.num_bytes > self._max_bytes:
            return 1
        num_dropped = 0
        while self._num_bytes + header.num_bytes > self._max_bytes:
            num_dropped += len(self.pop(next(iter(self._rows))))
        self._rows.setdefault(header.row_id, []).append((header, memoryview(bytearray(payload))))
        self._num_bytes += header.num_bytes
        return num_dropped

    def pop(self, row_id: RowId) -> list[tuple[ChunkHeader, memoryview]]:
        """The row's chunks in the order in which they came, which are kept no longer."""
        chunks = self._rows.pop(row_id, [])
        self._num_bytes -= sum(header.num_bytes for header, _ in chunks)
        return chunks
