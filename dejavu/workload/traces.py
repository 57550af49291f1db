"""Recorded traces: when requests came, and how long their prompts and answers were."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec

from dejavu.errors import ConfigError, nearest
from dejavu.workload.lines import numbered_texts

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace. ``arrival_s`` counts from the trace's first entry."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


class _MooncakeLine(msgspec.Struct, frozen=True):
    """Fields that a run needs; a trace may have more."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=0)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]


def read_trace(path: Path, most: int | None) -> list[TraceEntry]:
    """The first ``most`` entries in order of arrival. The file's ending tells the format: .csv or .jsonl.

    Raises:
        ConfigError: naming path and line of the first malformed entry; or an ending that is neither; or no entry.
    """
    readers = {".csv": _read_csv, ".jsonl": _read_json_lines}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: a trace ends in .csv (Azure) or .jsonl (Mooncake)")
    entries = list(islice(reader(path), most))
    if not entries:
        raise ConfigError(f"{path}: holds no request")
    start_s = min(entry.arrival_s for entry in entries)
    shifted = [msgspec.structs.replace(entry, arrival_s=entry.arrival_s - start_s) for entry in entries]
    return sorted(shifted, key=lambda entry: entry.arrival_s)


def _read_json_lines(path: Path) -> Iterator[TraceEntry]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, text in numbered_texts(path):
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        yield TraceEntry(
            arrival_s=line.timestamp / 1000, prompt_tokens=line.input_length, output_tokens=line.output_length
        )


def _read_csv(path: Path) -> Iterator[TraceEntry]:
    texts = numbered_texts(path)
    _, header_text = next(texts, (1, ""))
    header = next(csv.reader([header_text]), [])
    for name in AZURE_COLUMNS:
        if name not in header:
            raise ConfigError(f"{path}:1: has no column {name}\n{nearest(name, header) if header else 'it is empty'}")
    columns = [header.index(name) for name in AZURE_COLUMNS]
    for number, text in texts:
        row = next(csv.reader([text]))
        if len(row) != len(header):
            raise ConfigError(f"{path}:{number}: has {len(row)} fields; the header has {len(header)}")
        yield _csv_entry(path, number, *(row[column] for column in columns))


def _csv_entry(path: Path, number: int, timestamp: str, prompt_tokens: str, output_tokens: str) -> TraceEntry:
    try:
        entry = TraceEntry(
            arrival_s=_seconds(timestamp), prompt_tokens=int(prompt_tokens), output_tokens=int(output_tokens)
        )
    except ValueError as error:
        raise ConfigError(f"{path}:{number}: {error}") from error
    if entry.prompt_tokens < 0 or entry.output_tokens < 0:
        raise ConfigError(f"{path}:{number}: a length is negative")
    return entry


def _seconds(timestamp: str) -> float:
    """Seconds since 1970 of a time such as ``2023-11-16 18:17:03.9799600``; Azure writes seven digits."""
    whole, _, fraction = timestamp.partition(".")
    moment = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S")
    return (moment - datetime(1970, 1, 1)).total_seconds() + float(f"0.{fraction or 0}")
