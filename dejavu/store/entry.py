"""What the store holds: a key's entry and a consistent listing of many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key as it stood. ``mod_revision`` is what a compare-and-swap compares."""

    key: str
    value: bytes
    mod_revision: int
    create_revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All entries under a prefix as they stood at ``revision``, ordered by key."""

    entries: tuple[Entry, ...]
    revision: int


def entry_of(message: Any) -> Entry:
    """The entry that etcd's KeyValue message holds."""
    return Entry(
        key=message.key.decode(),
        value=message.value,
        mod_revision=message.mod_revision,
        create_revision=message.create_revision,
    )


def prefix_end(prefix: bytes) -> bytes:
    """The first key behind all keys that start with ``prefix``; etcd takes a zero byte for "to the very end"."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1]) if head else b"\x00"
