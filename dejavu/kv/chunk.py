"""A chunk: a box of one row's cells as contiguous bytes, with a header that proves what they are.

Payload order: [layer][K, V][head][position][head_dim]. The checksum covers the header's fields as well as the
payload, so that bytes can neither change nor land under another row, layer, head or position unnoticed.
One message carries several chunks, because a transfer's fixed cost is paid per message.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import xxhash

from dejavu.errors import Retryable
from dejavu.ids import Epoch, RowId
from dejavu.kv.box import BOTH, Span
from dejavu.kv.layout import KvLayout, LayerRange

MAX_MESSAGE_HEADER_BYTES = 60 * 1024
"""Below the transport's limit, so that an envelope of the engine's still fits around it."""

_CHUNK_HEADER_BYTES = 100
_MESSAGE_BYTES = 64


class ChunkCorrupt(Retryable):
    """Bytes are not what their header says; fetch them again or recompute the row."""


class ChunkHeader(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a chunk's bytes are. Ranges are [start, stop); layers are global numbers."""

    epoch: Epoch
    row_id: RowId
    layers: LayerRange
    heads: Span
    positions: Span
    dtype: str
    num_bytes: Annotated[int, msgspec.Meta(ge=0)]
    checksum: int
    """xxh3_64 over the other fields and the payload."""
    kinds: Span = BOTH
    """K and V, or one of them (only where a transfer is one contiguous piece of a cache)."""


class StepMark(msgspec.Struct, frozen=True, array_like=True):
    """One step of one token microbatch, at the stage that made these cells (DejaVu §4.2.3)."""

    microbatch: int
    step: int


class KvMessage(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="kv"):
    """The header of a message of KV: its payload is the chunks' payloads, one after the other."""

    cluster: str
    epoch: Epoch
    chunks: tuple[ChunkHeader, ...]
    step: StepMark | None = None
    """What the receiver may acknowledge when these chunks have landed; on the last message of a step alone."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return sum(chunk.num_bytes for chunk in self.chunks)


def seal(
    *,
    epoch: Epoch,
    row_id: RowId,
    layers: LayerRange,
    heads: Span,
    positions: Span,
    dtype: str,
    payload: memoryview,
    kinds: Span = BOTH,
) -> ChunkHeader:
    """A header that names these bytes and vouches for them."""
    header = ChunkHeader(
        epoch=epoch,
        row_id=row_id,
        layers=layers,
        heads=heads,
        positions=positions,
        dtype=dtype,
        num_bytes=payload.nbytes,
        checksum=0,
        kinds=kinds,
    )
    return msgspec.structs.replace(header, checksum=_checksum(header, payload))


def verify(header: ChunkHeader, payload: memoryview) -> None:
    """The bytes are exactly what was sealed under this header. Raises ChunkCorrupt with both values."""
    if payload.nbytes != header.num_bytes:
        raise ChunkCorrupt(f"{_name(header)}: {payload.nbytes} bytes came, {header.num_bytes} were sealed")
    found = _checksum(header, payload)
    if found != header.checksum:
        raise ChunkCorrupt(f"{_name(header)}: checksum {found:016x}, sealed {header.checksum:016x}")


def why_misfit(header: ChunkHeader, layout: KvLayout, layers: LayerRange, heads: Span) -> str | None:
    """Why even a genuine chunk cannot belong to a holding of these layers and heads, or None."""
    if header.dtype != layout.dtype:
        return f"dtype {header.dtype}, here {layout.dtype}"
    if not (layers.start <= header.layers.start and header.layers.stop <= layers.stop):
        return f"layers [{header.layers.start},{header.layers.stop}), here [{layers.start},{layers.stop})"
    if not heads[0] <= header.heads[0] < header.heads[1] <= heads[1]:
        return f"heads {list(header.heads)}, here {list(heads)}"
    if not 0 <= header.positions[0] < header.positions[1] <= layout.max_length:
        return f"positions {list(header.positions)}, here at most {layout.max_length}"
    if not 0 <= header.kinds[0] < header.kinds[1] <= 2:
        return f"kinds {list(header.kinds)} are neither K nor V"
    spans = (header.kinds, header.heads, header.positions)
    num_cells = len(header.layers) * math.prod(stop - start for start, stop in spans)
    expected_bytes = num_cells * layout.head_dim * layout.dtype_bytes
    if header.num_bytes != expected_bytes:
        return f"{header.num_bytes} bytes, {expected_bytes} in {layout.fingerprint}"
    return None


def max_chunks(cluster: str) -> int:
    """How many chunks one message of this cluster may carry within ``MAX_MESSAGE_HEADER_BYTES``, whatever they are."""
    return max(1, (MAX_MESSAGE_HEADER_BYTES - _MESSAGE_BYTES - len(cluster.encode())) // _CHUNK_HEADER_BYTES)


def encode_message(message: KvMessage) -> bytes:
    """The message's header as bytes. Raises ValueError when it is longer than a transport takes."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_MESSAGE_HEADER_BYTES:
        raise ValueError(
            f"header of {len(message.chunks)} chunks has {len(data)} bytes, "
            f"limit {MAX_MESSAGE_HEADER_BYTES}: send at most {max_chunks(message.cluster)} in one message"
        )
    return data


def decode_message(data: bytes) -> KvMessage:
    """The message of these bytes. Raises ChunkCorrupt when they are none."""
    try:
        return msgspec.msgpack.decode(data, type=KvMessage)
    except msgspec.DecodeError as error:
        raise ChunkCorrupt(f"unreadable KV message of {len(data)} bytes: {error}") from error


def _checksum(header: ChunkHeader, payload: memoryview) -> int:
    digest = xxhash.xxh3_64(msgspec.msgpack.encode(msgspec.structs.replace(header, checksum=0)))
    digest.update(payload)
    return int(digest.intdigest())


def _name(header: ChunkHeader) -> str:
    return (
        f"row {header.row_id} layers [{header.layers.start},{header.layers.stop}) "
        f"heads [{header.heads[0]},{header.heads[1]}) positions [{header.positions[0]},{header.positions[1]})"
    )
