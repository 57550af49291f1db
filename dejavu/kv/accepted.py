"""What the inbox says of the chunks that it was given."""

from __future__ import annotations

from dataclasses import dataclass, field

from dejavu.ids import RowId
from dejavu.kv.chunk import ChunkHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What a message or a declaration has changed."""

    completed: tuple[RowId, ...] = ()
    """Rows that became complete just now, each reported once."""
    dropped: int = 0
    """Chunks that were not used: stale, duplicate, or early beyond the limit."""
    corrupt: tuple[RowId, ...] = ()
    """Rows, as the headers say, of chunks that are not what they claim: to be fetched again or recomputed."""
    corrupt_chunks: tuple[ChunkHeader, ...] = ()
    """What these chunks claim to be."""


@dataclass(slots=True, kw_only=True)
class InboxCounters:
    """Chunks since the start, and bytes that have landed."""

    accepted: int = 0
    early: int = 0
    duplicate: int = 0
    stale: int = 0
    corrupt: int = 0
    early_dropped: int = 0
    refused: int = 0
    """Beyond the memory that copies of rows may take."""
    bytes_landed: int = 0


@dataclass(slots=True)
class Tally:
    """What a call has changed so far."""

    completed: list[RowId] = field(default_factory=list)
    dropped: int = 0
    corrupt: list[ChunkHeader] = field(default_factory=list)

    def result(self) -> Accepted:
        """The same, frozen; a row is named once however many of its chunks were corrupt."""
        return Accepted(
            completed=tuple(self.completed),
            dropped=self.dropped,
            corrupt=tuple(dict.fromkeys(chunk.row_id for chunk in self.corrupt)),
            corrupt_chunks=tuple(self.corrupt),
        )
