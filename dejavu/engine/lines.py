"""Lines of standard input, read without a buffer: what follows a line stays where a later reader finds it."""

from __future__ import annotations

import os


def read_line() -> bytes:
    """The next line of standard input, and not a byte more: another may have come with it. Empty at its end."""
    line = bytearray()
    while not line.endswith(b"\n"):
        more = os.read(0, 1)
        if not more:
            break
        line += more
    return bytes(line)
