"""The small messages of the link protocol, and the fixed-size frames in which they travel."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dejavu.transport.base import Buffer

PROTOCOL_VERSION = 1
FRAME_BYTES = 16 * 1024
"""Size of a pre-posted receive buffer; whatever encodes longer goes round it as a ``Long``."""
INLINE_BYTES = 8 * 1024
"""A payload up to this size rides in its ``Head``: a second transfer would cost more than the copy."""
FRAME_TAG = 0
_LENGTH_BYTES = 4


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Listener to connector, first: prove the secret over this nonce."""

    version: int
    nonce: bytes


class Greeting(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Connector to listener: the encoded Hello, its proof, and a nonce for the listener's own proof."""

    hello: bytes
    proof: bytes
    nonce: bytes


class Accept(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Listener to connector: admitted, with these credits."""

    proof: bytes
    credit_messages: int
    credit_bytes: int


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Listener to connector: not admitted, and why."""

    reason: str


class Head(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A message: its payload is ``inline``, or follows in pieces of these sizes under tags from ``first_tag`` on."""

    header: bytes
    inline: bytes
    piece_bytes: tuple[int, ...]
    first_tag: int


class Long(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A Head too long for a frame comes as ``num_bytes`` bytes under ``tag``."""

    num_bytes: int
    tag: int


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Listener to connector: this much has been released since the last Credit."""

    messages: int
    num_bytes: int


class Want(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Connector to listener: a message waits for credits, so report the next release at once."""


class Close(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Connector to listener: nothing more comes."""


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Listener to connector: everything before your Close has been received."""


Frame: TypeAlias = Challenge | Greeting | Accept | Refuse | Head | Long | Credit | Want | Close | Closed


class FrameError(ValueError):
    """The bytes are no frame of this protocol."""


def encode(frame: Frame) -> bytearray:
    """The frame's length and the frame."""
    encoded = bytearray(_LENGTH_BYTES)
    msgspec.msgpack.Encoder().encode_into(frame, encoded, _LENGTH_BYTES)
    encoded[:_LENGTH_BYTES] = (len(encoded) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little")
    return encoded


def decode(buffer: Buffer) -> Frame:
    """The frame at the start of the buffer. Raises FrameError on anything else."""
    length = int.from_bytes(buffer[:_LENGTH_BYTES], "little")
    if length > len(buffer) - _LENGTH_BYTES:
        raise FrameError(f"a frame of {length} bytes in a buffer of {len(buffer)}")
    try:
        frame: Frame = msgspec.msgpack.decode(buffer[_LENGTH_BYTES : _LENGTH_BYTES + length], type=Frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FrameError(f"not a frame of protocol version {PROTOCOL_VERSION}: {error}") from error
    return frame
