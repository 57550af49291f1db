"""A sweep's points as a table: what was swept, how each ended, and the main figures of what it left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dejavu.report.streaming_table import Cell, Columns

_ABSENT = "-"
_THROUGHPUT: Mapping[str, str] = {
    "requests_per_s": "throughput.requests_per_s",
    "tokens_per_s": "throughput.tokens_per_s",
}
_LATENCY: Mapping[str, str] = {"latency_s_per_token": "latency.normalized_s_per_token.median"}
_FIGURES: Mapping[str, Mapping[str, str]] = {
    "plan.json": {
        "mode": "mode",
        "in_flight": "in_flight",
        "prompt_machines": "split.prompt",
        "token_machines": "split.token",
        "requests_per_s": "predicted.requests_per_s",
        "tokens_per_s": "predicted.tokens_per_s",
        "latency_s_per_token": "predicted.normalized_latency_s",
        "cost_per_hour": "predicted.cost_per_hour",
    },
    "simulation.json": {"mode": "mode", "makespan_s": "makespan_s", **_THROUGHPUT, **_LATENCY, "cost": "cost"},
    "metrics.json": {"wall_s": "wall_s", "requests_failed": "requests.failed", **_THROUGHPUT, **_LATENCY},
}
"""Column and place in each file; a later file's figure wins, since what was measured counts more than a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One point that is over."""

    number: int
    """Its folder's name."""
    swept: Mapping[str, str]
    """The values that distinguish it, by key."""
    outcome: str
    """``done``, or how it failed."""
    reason: str
    folder: Path


def sweep_rows(points: Sequence[SweepPoint]) -> list[Columns]:
    """``table.csv``: a row for each point, all with the same columns. Reads the points' files."""
    swept = list(dict.fromkeys(key for point in points for key in point.swept))
    figures = [main_figures(point.folder) for point in points]
    columns = list(dict.fromkeys(column for one in figures for column in one))
    return [
        {
            "job": point.number,
            **{key: point.swept.get(key, _ABSENT) for key in swept},
            "outcome": point.outcome,
            **{column: found.get(column, _ABSENT) for column in columns},
            "reason": point.reason,
        }
        for point, found in zip(points, figures, strict=True)
    ]


def main_figures(folder: Path) -> Columns:
    """The main figures of a run by column, out of the files that it left in ``folder``; empty where there are none."""
    found: Columns = {}
    for name, places in _FIGURES.items():
        document = _document(folder / name)
        for column, place in places.items():
            cell = _cell(document, place)
            if cell is not None:
                found[column] = cell
    return found


def _document(path: Path) -> object:
    """The file's content; None where a failed point left none, or a part of one."""
    try:
        return msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None


def _cell(document: object, place: str) -> Cell | None:
    for key in place.split("."):
        document = document.get(key) if isinstance(document, dict) else None
    return document if isinstance(document, str | int | float) else None
