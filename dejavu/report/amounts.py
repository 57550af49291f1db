"""Numbers as people read them. Bytes are decimal: 1 MB is 10**6 bytes."""

from __future__ import annotations

UNKNOWN = "–"


def show_bytes(number: float | None) -> str:
    """``98.1 MB``; a dash for an unknown number."""
    if number is None:
        return UNKNOWN
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{_three_digits(number / size)} {unit}"
    return f"{number:.0f} B"


def show_seconds(seconds: float | None) -> str:
    """``12.3 ms``, ``4.56 s`` or ``3 min 05 s``; a dash for an unknown time."""
    if seconds is None:
        return UNKNOWN
    if seconds >= 100:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds >= 1 or seconds == 0:
        return f"{_three_digits(seconds)} s"
    return f"{_three_digits(seconds * 1e3)} ms"


def show_share(share: float | None) -> str:
    """``83 %``; a dash for an unknown share."""
    return UNKNOWN if share is None else f"{share * 100:.0f} %"


def show_rate(rate: float | None, unit: str) -> str:
    """``73.4 tokens/s``; a dash for an unknown rate."""
    return UNKNOWN if rate is None else f"{_three_digits(rate)} {unit}/s"


def show_count(number: int, noun: str) -> str:
    """``1 token``, ``1,234 tokens``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def printable(text: str) -> str:
    """The text without characters that could steer a terminal; line ends stay."""
    spaced = text.replace("\r\n", "\n").replace("\t", "    ")
    return "".join(
        letter if letter == "\n" or letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in spaced
    )


def _three_digits(number: float) -> str:
    if number >= 100 or number == 0:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"
