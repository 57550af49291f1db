"""JSON files that are either whole or absent, also when the writer is killed half-way."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


def write_json(path: Path, value: object, *, indent: int = 2) -> None:
    """``path`` holds ``value`` as JSON; a reader sees the old file or the whole new one, never a part.

    ``indent`` spaces a level; 0 writes one line. NaN and infinities become null. The parent folder must exist.
    """
    encoded = msgspec.json.encode(value)
    replace_file(path, msgspec.json.format(encoded, indent=indent) + b"\n" if indent else encoded)


def replace_file(path: Path, content: bytes) -> None:
    """``path`` holds exactly ``content``; the change is one rename."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
