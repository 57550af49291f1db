"""What a row's file holds and where: append-only records, each with a checksum of its own.

A row has two files in its folder: ``<row_id>.kv`` with the chunks' bytes, and ``<row_id>.index`` with a record for each
chunk, written after its bytes. A record is framed by its length and an xxh3_64 of its body, so that a record torn by a
crash, and everything after it, is told from a whole one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import xxhash

from dejavu.ids import RowId
from dejavu.kv.chunk import ChunkHeader

DATA_SUFFIX: Final = ".kv"
INDEX_SUFFIX: Final = ".index"

_FRAME: Final = struct.Struct("<IQ")
"""Body bytes, checksum of the body."""


class IndexRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One chunk: its header, whose it is, and the offset of its bytes in the row's data file."""

    cluster: str
    header: ChunkHeader
    offset: Annotated[int, msgspec.Meta(ge=0)]

    @property
    def stop(self) -> int:
        """The offset behind its last byte."""
        return self.offset + self.header.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What an index file holds: its whole records, and how many bytes they and the unreadable rest take."""

    records: tuple[IndexRecord, ...]
    good_bytes: int
    torn_bytes: int

    @property
    def data_end(self) -> int:
        """The offset in the data file behind every recorded chunk."""
        return max((record.stop for record in self.records), default=0)


def data_path(folder: Path, row_id: RowId) -> Path:
    """Where a row's bytes are."""
    return folder / f"{row_id}{DATA_SUFFIX}"


def index_path(folder: Path, row_id: RowId) -> Path:
    """Where a row's index is."""
    return folder / f"{row_id}{INDEX_SUFFIX}"


def stored_rows(folder: Path) -> tuple[RowId, ...]:
    """The rows that have an index in the folder, ascending."""
    names = (path.stem for path in folder.glob(f"*{INDEX_SUFFIX}"))
    return tuple(sorted(RowId(int(name)) for name in names if name.isdecimal()))


def encode_record(record: IndexRecord) -> bytes:
    """The record as it is appended to an index."""
    body = msgspec.msgpack.encode(record)
    return _FRAME.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def read_index(path: Path) -> Index:
    """The records up to the first one that is not whole; none where there is no file. Raises OSError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    records: list[IndexRecord] = []
    good_bytes = 0
    for record, stop in _decode(data):
        records.append(record)
        good_bytes = stop
    return Index(records=tuple(records), good_bytes=good_bytes, torn_bytes=len(data) - good_bytes)


def _decode(data: bytes) -> Iterator[tuple[IndexRecord, int]]:
    start = 0
    while start + _FRAME.size <= len(data):
        num_bytes, checksum = _FRAME.unpack_from(data, start)
        body = data[start + _FRAME.size : start + _FRAME.size + num_bytes]
        if len(body) < num_bytes or xxhash.xxh3_64_intdigest(body) != checksum:
            return
        try:
            record = msgspec.msgpack.decode(body, type=IndexRecord)
        except msgspec.DecodeError:
            # Another version's record: nothing after it can be trusted to be where this version would look.
            return
        start += _FRAME.size + num_bytes
        yield record, start
