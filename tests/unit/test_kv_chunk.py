"""Chunks vouch for their bytes, and message headers stay small."""

from __future__ import annotations

import msgspec
import pytest

from dejavu.ids import Epoch, RowId
from dejavu.kv.chunk import (
    MAX_MESSAGE_HEADER_BYTES,
    ChunkCorrupt,
    ChunkHeader,
    KvMessage,
    decode_message,
    encode_message,
    max_chunks,
    seal,
    verify,
)
from dejavu.kv.layout import LayerRange

HUGE = 2**63 - 1


def sealed(payload: bytes) -> ChunkHeader:
    return seal(
        epoch=Epoch(1),
        row_id=RowId(5),
        layers=LayerRange(2, 3),
        heads=(0, 4),
        positions=(0, 9),
        dtype="float32",
        payload=memoryview(payload),
    )


def largest_header() -> ChunkHeader:
    return ChunkHeader(
        epoch=Epoch(HUGE),
        row_id=RowId(HUGE),
        layers=LayerRange(2**31, 2**32),
        heads=(2**31, 2**32),
        positions=(2**31, 2**32),
        dtype="bfloat16",
        num_bytes=HUGE,
        checksum=2**64 - 1,
    )


def test_a_sealed_chunk_is_verified() -> None:
    verify(sealed(b"0123456789"), memoryview(b"0123456789"))


def test_changed_bytes_are_refused_with_both_checksums() -> None:
    header = sealed(b"0123456789")
    with pytest.raises(ChunkCorrupt, match=f"row 5 layers .* sealed {header.checksum:016x}"):
        verify(header, memoryview(b"0123456780"))


def test_a_shorter_payload_is_refused_with_both_lengths() -> None:
    with pytest.raises(ChunkCorrupt, match="9 bytes came, 10 were sealed"):
        verify(sealed(b"0123456789"), memoryview(b"012345678"))


def test_another_rows_header_is_refused_for_the_same_bytes() -> None:
    header = msgspec.structs.replace(sealed(b"0123"), row_id=RowId(6))
    with pytest.raises(ChunkCorrupt, match="row 6"):
        verify(header, memoryview(b"0123"))


def test_a_message_comes_back_as_it_was_encoded() -> None:
    message = KvMessage(cluster="c", epoch=Epoch(1), chunks=(sealed(b"01"), sealed(b"2345")))
    assert decode_message(encode_message(message)) == message
    assert message.num_bytes == 6


def test_bytes_that_are_no_message_are_refused() -> None:
    for data in (b"", b"\xff\x00", msgspec.msgpack.encode(["kv", "c", 1, [[1, 2, [3, 3], [0, 1], [0, 1], "f", 0, 0]]])):
        with pytest.raises(ChunkCorrupt, match="unreadable KV message"):
            decode_message(data)


def test_the_largest_headers_fit_as_many_as_are_allowed_and_more_are_refused() -> None:
    cluster = "c" * 200
    most = max_chunks(cluster)
    message = KvMessage(cluster=cluster, epoch=Epoch(HUGE), chunks=(largest_header(),) * most)
    assert len(encode_message(message)) <= MAX_MESSAGE_HEADER_BYTES
    too_many = msgspec.structs.replace(message, chunks=(largest_header(),) * (most + most // 2))
    with pytest.raises(ValueError, match=f"send at most {most}"):
        encode_message(too_many)
