"""Level 1 of DéjàVuLib: one contiguous chunk to or from local memory or a peer (DejaVu, table 1: flush, fetch).

A destination is anything with ``put``; another kind of memory is another class here and changes nothing above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dejavu.kv.chunk import ChunkHeader, verify
from dejavu.kv.staging import LentMemory


class Sender(Protocol):
    """The way to the peers, by name; the engine implements it over its links."""

    def send(self, owner: str, header: bytes, payload: Sequence[memoryview]) -> Future[None]:
        """Queues one message to ``owner``; never blocks.

        The future resolves when the payload's memory may be reused; it fails when the peer is gone.
        """


class Destination(Protocol):
    """Where a contiguous chunk can go."""

    def put(self, header: bytes, payload: memoryview) -> Future[None]:
        """Takes the payload; the future resolves when its memory may be reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMemory:
    """A contiguous uint8 tensor of this process; the header is not kept."""

    into: Tensor

    def lend(self) -> LentMemory:
        """``into`` as staging memory: ``scatter`` gathers and seals where the bytes shall be, and ``put`` copies none.

        For regions in host memory. Raises ValueError when ``into`` is not in host memory.
        """
        return LentMemory(self.into)

    def put(self, header: bytes, payload: memoryview) -> Future[None]:
        """The payload's bytes are at the start of ``into``. Raises ValueError when they do not fit."""
        _copy_bytes(payload, self.into)
        done: Future[None] = Future()
        done.set_result(None)
        return done


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMemory:
    """The host memory of a peer."""

    owner: str
    sender: Sender

    def put(self, header: bytes, payload: memoryview) -> Future[None]:
        """The payload is queued for the peer as one message."""
        return self.sender.send(self.owner, header, (payload,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Destinations:
    """The ``Sender`` of owners that are destinations of this process, such as a DiskMemory for each."""

    by_owner: Mapping[str, Destination]

    def send(self, owner: str, header: bytes, payload: Sequence[memoryview]) -> Future[None]:
        """The owner's destination takes the message. Raises KeyError for an owner without one."""
        whole = payload[0] if len(payload) == 1 else memoryview(b"".join(payload))
        return self.by_owner[owner].put(header, whole)


def flush(header: bytes, payload: memoryview, destination: Destination) -> Future[None]:
    """One contiguous chunk is on its way; its memory may be reused when the future has resolved.

    Resolved does not mean delivered to a peer's rows: only the peer's coverage proves that.
    """
    return destination.put(header, payload)


def fetch(header: ChunkHeader, payload: memoryview, into: Tensor) -> None:
    """The verified bytes of one chunk are at the start of ``into`` (contiguous uint8, any device).

    Raises ChunkCorrupt, and leaves ``into`` as it was, when the payload is not what the header says;
    ValueError when it does not fit.
    """
    verify(header, payload)
    _copy_bytes(payload, into)


def bytes_tensor(payload: memoryview) -> Tensor:
    """The payload as a uint8 tensor, without a copy unless the memory is read-only."""
    writable = bytearray(payload) if payload.readonly else payload
    return torch.frombuffer(writable, dtype=torch.uint8)


def _copy_bytes(payload: memoryview, into: Tensor) -> None:
    if into.dtype != torch.uint8 or not into.is_contiguous() or into.numel() < payload.nbytes:
        raise ValueError(
            f"{payload.nbytes} bytes need a contiguous uint8 tensor, got {into.numel()} of {into.dtype}"
            f"{'' if into.is_contiguous() else ', not contiguous'}"
        )
    if payload.nbytes == 0:
        return
    came = bytes_tensor(payload)
    # Bytes that were gathered into lent memory are there already.
    if came.data_ptr() != into.data_ptr():
        into.view(-1)[: payload.nbytes].copy_(came)
