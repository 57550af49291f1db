"""The verdict of a soak, and its figures as a table and as a file."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from soak_history import Expected, History

from dejavu.control.journal import RepairJournal
from dejavu.control.receipts import receipts
from dejavu.request import Request

_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """A run that is over."""

    history: History
    requests: Sequence[Request]
    expected: Expected
    journals: Sequence[RepairJournal]
    faults: Mapping[str, int]
    num_at_once: int
    wall_s: float
    problem: str | None
    """Why it ended before all requests had."""

    @property
    def violations(self) -> list[str]:
        """Everything that must not have happened."""
        found = [] if self.problem is None else [f"the run failed: {self.problem}"]
        return found + self.history.violations(self.requests, self.expected)


def summary(soaked: Soaked) -> dict[str, object]:
    """The run in figures, as ``soak.json`` has them."""
    told = receipts(soaked.journals)
    pauses_s = sorted(one["total_s"] for one in told if one["total_s"] is not None)
    rows: Counter[str] = Counter()
    how: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    for one in told:
        rows.update(one["rows"])
        how.update(one["how"].values())
        causes.update(failure["cause"] for failure in one["failures"])
    again = [number for one in told for number in one["steps_recomputed"].values()]
    return {
        "wall_s": soaked.wall_s,
        "requests": len(soaked.requests),
        "ended": len(soaked.history.endings),
        "resumed": sum(completion.resumed > 0 for completion in soaked.history.endings),
        "tokens": soaked.history.num_tokens,
        "longest_pause_s": soaked.history.longest_pause_s,
        "faults": dict(soaked.faults),
        "two_at_once": soaked.num_at_once,
        "repairs": len(told),
        "unfinished_repairs": [one["number"] for one in told if one["phase"] != "done"],
        "causes": dict(causes),
        "replaced_by": dict(how),
        "pause_s": {
            "median": statistics.median(pauses_s) if pauses_s else None,
            "p95": pauses_s[int(0.95 * (len(pauses_s) - 1))] if pauses_s else None,
            "max": pauses_s[-1] if pauses_s else None,
        },
        "rows": dict(rows),
        "steps_recomputed": {"sum": sum(again), "max": max(again, default=0)},
        "violations": soaked.violations,
        "journal": told,
    }


def show(console: Console, figures: Mapping[str, object]) -> None:
    """The figures as a table, and what was violated."""
    table = Table(title="Soak", show_header=False)
    violations = figures["violations"]
    assert isinstance(violations, list)
    for name, value in figures.items():
        if name in ("journal", "violations"):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{key} {_rounded(number)}" for key, number in value.items()) or "none"
        table.add_row(name.replace("_", " "), str(_rounded(value)))
    table.add_row("violations", str(len(violations)))
    console.print(table)
    for line in violations[:_MOST_SHOWN]:
        console.print(line, highlight=False, soft_wrap=True)
    if len(violations) > _MOST_SHOWN:
        console.print(f"... and {len(violations) - _MOST_SHOWN} more")


def _rounded(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value
