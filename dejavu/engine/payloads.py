"""Payloads that are lists of values, msgpack-encoded: what a worker holds, and what it did when."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dejavu.control.holdings import HeldRow
from dejavu.report.spans import Span

_ENCODER = msgspec.msgpack.Encoder()
_HELD = msgspec.msgpack.Decoder(list[HeldRow])
_SPANS = msgspec.msgpack.Decoder(list[Span])


def encode_held(rows: Sequence[HeldRow]) -> bytes:
    """The payload of ``Holdings``."""
    return _ENCODER.encode(rows)


def decode_held(payload: bytes | memoryview) -> list[HeldRow]:
    """The rows of a ``Holdings`` payload."""
    return _HELD.decode(payload)


def encode_spans(spans: list[Span]) -> bytes:
    """The payload of ``Report``."""
    return _ENCODER.encode(spans)


def decode_spans(payload: bytes | memoryview) -> list[Span]:
    """The spans of a ``Report`` payload."""
    return _SPANS.decode(payload)
