"""Recorded traces: when requests came, and how long their prompts and answers were. The file's ending and its first
line tell the format; see ``trace_formats.py``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from dejavu.errors import ConfigError
from dejavu.workload.trace_formats import BadEntry, TraceEntry, csv_entries, json_entries, json_line_entries

logger = logging.getLogger(__name__)

MOST_NAMED = 5
"""Bad lines that are named one by one; of more, the number is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a file holds."""

    path: Path
    entries: tuple[TraceEntry, ...]
    """In order of arrival, the first at 0."""
    bad: tuple[BadEntry, ...]
    """Left out."""

    @property
    def complaint(self) -> str | None:
        """How many lines were left out, and which; None where none was."""
        if not self.bad:
            return None
        named = "; ".join(f"{one.place}: {one.reason}" for one in self.bad[:MOST_NAMED])
        more = f"; and {len(self.bad) - MOST_NAMED} more" if len(self.bad) > MOST_NAMED else ""
        total = len(self.bad) + len(self.entries)
        return f"{self.path}: {len(self.bad)} of {total} entries are left out: {named}{more}"


def read_trace(path: Path, most: int | None, *, skip_bad: bool = False) -> Trace:
    """The first ``most`` entries in order of arrival.

    Args:
        path: ends in .csv, .jsonl or .json.
        most: of the good ones; None: all.
        skip_bad: a malformed entry is left out; otherwise it is refused.

    Raises:
        ConfigError: naming path and line of the first malformed entry; or an ending that is none of these; or no entry.
    """
    readers = {".csv": csv_entries, ".jsonl": json_line_entries, ".json": json_entries}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: a trace ends in .csv, .jsonl or .json")
    bad: list[BadEntry] = []
    entries = list(islice(_good(path, reader(path), bad, skip_bad=skip_bad), most))
    if not entries:
        left_out = f"; {bad[0].place}: {bad[0].reason}" if bad else ""
        raise ConfigError(f"{path}: holds no request{left_out}")
    start_s = min(entry.arrival_s for entry in entries)
    shifted = [msgspec.structs.replace(entry, arrival_s=entry.arrival_s - start_s) for entry in entries]
    return Trace(path=path, entries=tuple(sorted(shifted, key=lambda entry: entry.arrival_s)), bad=tuple(bad))


def _good(
    path: Path, found: Iterator[TraceEntry | BadEntry], bad: list[BadEntry], *, skip_bad: bool
) -> Iterator[TraceEntry]:
    """The entries that are well formed; the others are in ``bad``, or refused."""
    for one in found:
        if isinstance(one, TraceEntry):
            yield one
        elif skip_bad:
            bad.append(one)
        else:
            raise ConfigError(f"{path}:{one.place}: {one.reason}\nworkload.bad_lines=skip leaves such lines out")
