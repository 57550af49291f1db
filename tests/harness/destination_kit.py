"""Destinations of level 1 for tests, each with the way to look at what has come there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol

import pytest
import torch

from dejavu.ids import Epoch, RowId
from dejavu.kv.chunk import ChunkHeader, KvMessage, decode_message, encode_message, seal
from dejavu.kv.disk import DiskMemory
from dejavu.kv.disk_row import read_row
from dejavu.kv.layout import LayerRange
from dejavu.kv.primitives import Destination, LocalMemory, RemoteMemory, fetch, flush
from dejavu.transport.base import Link
from dejavu.transport.credits import CreditLimit

from harness.transport_kit import WAIT_S, Bench, Inbox, hello, transport_maker

CLUSTER, EPOCH, ROW = "c", Epoch(1), RowId(1)
ARENA_BYTES = 16 << 20
PLENTY = CreditLimit(messages=1000, num_bytes=64 << 20)
"""More than any test sends, because messages are looked at and released only at its end."""


def sealed(payload: memoryview, position: int = 0) -> bytes:
    """A message's header for one chunk of these bytes. Destinations do not look at what the cells are."""
    chunk = seal(
        epoch=EPOCH,
        row_id=ROW,
        layers=LayerRange(0, 1),
        heads=(0, 1),
        positions=(position, position + 1),
        dtype="float32",
        payload=payload,
    )
    return encode_message(KvMessage(cluster=CLUSTER, epoch=EPOCH, chunks=(chunk,)))


def chunk_of(header: bytes) -> ChunkHeader:
    """The only chunk of a message."""
    return decode_message(header).chunks[0]


class Place(Protocol):
    """A destination and the way to look at what has come there."""

    def destination(self, num_bytes: int) -> Destination:
        """For the next message, which is of that size."""

    def arrived(self, headers: Sequence[bytes]) -> list[tuple[ChunkHeader, memoryview]]:
        """What lies there, in the order in which it came, once so many messages have."""


class LocalPlace:
    """An arena of this process; each message gets the next part of it."""

    def __init__(self) -> None:
        self._arena = torch.zeros(ARENA_BYTES, dtype=torch.uint8)
        self._end = 0

    def destination(self, num_bytes: int) -> Destination:
        start, self._end = self._end, self._end + num_bytes
        return LocalMemory(into=self._arena[start : self._end])

    def arrived(self, headers: Sequence[bytes]) -> list[tuple[ChunkHeader, memoryview]]:
        chunks, start = [], 0
        for header in map(chunk_of, headers):
            chunks.append((header, self._arena[start : start + header.num_bytes].numpy().data))
            start += header.num_bytes
        return chunks


class OneLink:
    """The ``Sender`` of these tests."""

    def __init__(self, link: Link, timeout_s: float) -> None:
        self._link, self._timeout_s = link, timeout_s

    def send(self, owner: str, header: bytes, payload: Sequence[memoryview]) -> Future[None]:
        return self._link.send(header, payload, timeout_s=self._timeout_s)


class PeerPlace:
    """Another transport of this process, which keeps what comes."""

    def __init__(self, bench: Bench, *, credits: CreditLimit = PLENTY, timeout_s: float = WAIT_S) -> None:
        self.inbox = Inbox()
        self.receiver = bench.transport(credits=credits)
        self.address = self.receiver.listen(self.inbox)
        self.link = bench.transport().connect(self.address, hello(), peer="w1")
        self._remote = RemoteMemory(owner="w1", sender=OneLink(self.link, timeout_s))

    def destination(self, num_bytes: int) -> Destination:
        return self._remote

    def arrived(self, headers: Sequence[bytes]) -> list[tuple[ChunkHeader, memoryview]]:
        messages = [self.inbox.take() for _ in headers]
        return [(chunk_of(message.header), message.payload) for message in messages]


class DiskPlace:
    """A row's files."""

    def __init__(self, memory: DiskMemory) -> None:
        self._memory = memory

    def destination(self, num_bytes: int) -> Destination:
        return self._memory

    def arrived(self, headers: Sequence[bytes]) -> list[tuple[ChunkHeader, memoryview]]:
        row = read_row(self._memory.folder, ROW, cluster=CLUSTER)
        return [(record.header, row.read(record)) for record in row.records]


@contextmanager
def transports(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Transports of one kind; at the end nothing of them is left."""
    made = Bench(transport_maker(kind, monkeypatch), counts_descriptors=kind != "ucx")
    yield made
    made.finish()


def put(place: Place, payload: memoryview, position: int) -> tuple[bytes, Future[None]]:
    """The bytes are on their way as one chunk; its message's header, and what ``flush`` returned."""
    header = sealed(payload, position)
    return header, flush(header, payload, place.destination(payload.nbytes))


def fetched(header: ChunkHeader, payload: memoryview) -> bytes:
    """The bytes, proven to be those that were sealed."""
    into = torch.zeros(payload.nbytes, dtype=torch.uint8)
    fetch(header, payload, into)
    return into.numpy().tobytes()
