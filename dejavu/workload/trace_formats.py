"""The formats of recorded traces, an entry at a time.

- CSV by its header: Azure's LLM inference trace (TIMESTAMP, ContextTokens, GeneratedTokens), lengths as ShareGPT's
  are published (num_prefill_tokens, num_decode_tokens), or plain columns (arrival_s, prompt_tokens, new_tokens).
- JSON lines: Mooncake's trace (timestamp in ms, input_length, output_length).
- JSON: a list of pairs [prompt, new], as the original project's.

Without times, every request is there at once.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from dejavu.errors import ConfigError, nearest
from dejavu.workload.lines import numbered_texts


class TraceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace, with whatever zero its times count from."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


class BadEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that is no request."""

    place: str
    """The number of its line, or of the entry where a file has no lines."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """The columns of one kind of CSV, each with the names it may have."""

    prompt: tuple[str, ...]
    new: tuple[str, ...]
    arrival: tuple[str, ...] = ()
    seconds: Callable[[str], float] = float

    def found(self, header: list[str]) -> dict[str, int] | None:
        """Where the columns are; None where one is missing."""
        places = {}
        for key in ("prompt", "new", "arrival"):
            names: tuple[str, ...] = getattr(self, key)
            here = [name for name in names if name in header]
            if here:
                places[key] = header.index(here[0])
            elif names:
                return None
        return places


def _azure_seconds(timestamp: str) -> float:
    """Seconds since 1970 of a time such as ``2023-11-16 18:17:03.9799600`` (seven digits, as in the traces of 2023) or
    ``2024-05-10 00:00:00.009930+00:00`` (of 2024). All are UTC."""
    whole, _, fraction = timestamp.strip().removesuffix("Z").removesuffix("+00:00").partition(".")
    moment = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S")
    return (moment - datetime(1970, 1, 1)).total_seconds() + float(f"0.{fraction or 0}")


_KINDS = (
    _Columns(prompt=("ContextTokens",), new=("GeneratedTokens",), arrival=("TIMESTAMP",), seconds=_azure_seconds),
    _Columns(prompt=("prompt_tokens", "prompt"), new=("new_tokens", "new"), arrival=("arrival_s", "arrival")),
    _Columns(prompt=("num_prefill_tokens",), new=("num_decode_tokens",)),
)


def csv_entries(path: Path) -> Iterator[TraceEntry | BadEntry]:
    """Entries of a CSV with a header. Raises ConfigError where the header is of no known kind."""
    texts = numbered_texts(path)
    _, header_text = next(texts, (1, ""))
    header = [name.strip() for name in next(csv.reader([header_text]), [])]
    for columns in _KINDS:
        places = columns.found(header)
        if places is not None:
            yield from _rows(texts, columns, places, len(header))
            return
    raise ConfigError(f"{path}:1: {_missing(header)}")


def _missing(header: list[str]) -> str:
    """What the header lacks of the kind that it comes nearest to."""
    kind = max(_KINDS, key=lambda columns: sum(name in header for name in _all_names(columns)))
    wanted = [names for names in (kind.arrival, kind.prompt, kind.new) if names]
    name = next(names[0] for names in wanted if not any(one in header for one in names))
    return f"has no column {name}\n{nearest(name, header) if header else 'it is empty'}"


def _all_names(columns: _Columns) -> tuple[str, ...]:
    return (*columns.arrival, *columns.prompt, *columns.new)


def _rows(
    texts: Iterator[tuple[int, str]], columns: _Columns, places: Mapping[str, int], width: int
) -> Iterator[TraceEntry | BadEntry]:
    for number, text in texts:
        row = next(csv.reader([text]))
        if len(row) != width:
            yield BadEntry(place=str(number), reason=f"has {len(row)} fields; the header has {width}")
            continue
        try:
            arrival_s = columns.seconds(row[places["arrival"]]) if "arrival" in places else 0.0
            prompt, new = int(row[places["prompt"]]), int(row[places["new"]])
        except ValueError as error:
            yield BadEntry(place=str(number), reason=str(error))
            continue
        yield _entry(str(number), arrival_s, prompt, new)


class _MooncakeLine(msgspec.Struct, frozen=True):
    """Fields that a run needs; a trace may have more."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=0)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]


def json_line_entries(path: Path) -> Iterator[TraceEntry | BadEntry]:
    """Entries of a file with a JSON object a line."""
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, text in numbered_texts(path):
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            yield BadEntry(place=str(number), reason=str(error))
            continue
        yield _entry(str(number), line.timestamp / 1000, line.input_length, line.output_length)


def json_entries(path: Path) -> Iterator[TraceEntry | BadEntry]:
    """Entries of a file that is one list of pairs. Raises ConfigError where it is none."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is no JSON ({str(error).splitlines()[0][:100]})") from error
    if not isinstance(found, list):
        raise ConfigError(f"{path}: is no list of pairs [prompt, new]")
    for index, pair in enumerate(found):
        place = f"entry {index}"
        is_pair = isinstance(pair, list) and len(pair) == 2
        if is_pair and all(isinstance(one, int) and not isinstance(one, bool) for one in pair):
            yield _entry(place, 0.0, pair[0], pair[1])
        else:
            yield BadEntry(place=place, reason=f"{str(pair)[:40]} is no pair of whole numbers [prompt, new]")


def _entry(place: str, arrival_s: float, prompt_tokens: int, output_tokens: int) -> TraceEntry | BadEntry:
    if prompt_tokens < 0 or output_tokens < 0:
        return BadEntry(place=place, reason="a length is negative")
    if max(prompt_tokens, output_tokens) >= 2**31:
        return BadEntry(place=place, reason="a length is beyond any model")
    if not math.isfinite(arrival_s):
        return BadEntry(place=place, reason="its time is no number")
    return TraceEntry(arrival_s=arrival_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
