"""Simulated comparisons: the best arrangement of each kind by number of machines or rows, as a table and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.report.figure_style import COLORS, DPI, FAINT, GRID, TEXT, Caption, clear_frame, save_png, write_caption
from dejavu.report.streaming_table import Columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (9.0, 4.6)
_MARKERS = ("o", "s", "D", "^")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPoint:
    """The best that one case does with so many machines; without times where nothing of it is feasible."""

    case: str
    machines: int
    rows: int | None = None
    """Of a microbatch."""
    arrangement: str = "-"
    in_flight: int | None = None
    makespan_s: float | None = None
    tokens_per_s: float | None = None
    cost: float | None = None
    reason: str = ""
    """Why there is no time."""


def compared_rows(points: Sequence[ComparedPoint]) -> list[Columns]:
    """``table.csv``."""
    return [
        {
            "case": one.case,
            "machines": one.machines,
            "rows": "-" if one.rows is None else one.rows,
            "arrangement": one.arrangement,
            "in_flight": "-" if one.in_flight is None else one.in_flight,
            "makespan_s": "-" if one.makespan_s is None else one.makespan_s,
            "tokens_per_s": "-" if one.tokens_per_s is None else one.tokens_per_s,
            "cost": "-" if one.cost is None else one.cost,
        }
        for one in points
    ]


def times_shorter(points: Sequence[ComparedPoint], case: str, other: str, *, by_rows: bool) -> dict[int, float]:
    """How many times shorter ``case`` is than ``other``, by number of machines (or rows), where both can be done."""
    spans = {(one.case, _across(one, by_rows)): one.makespan_s for one in points if one.makespan_s}
    found = {}
    for (name, across), makespan_s in spans.items():
        beside_s = spans.get((other, across))
        if name == case and makespan_s and beside_s:
            found[across] = beside_s / makespan_s
    return found


def draw_comparison(path: Path, points: Sequence[ComparedPoint], caption: Caption, *, by_rows: bool) -> None:
    """``path`` is a PNG of makespan, and of cost where prices are known, by number of machines or rows."""
    from matplotlib.figure import Figure

    has_cost = any(one.cost is not None for one in points)
    figure = Figure(figsize=_SIZE_INCHES, dpi=DPI, facecolor="white")
    panels = figure.subplots(1, 2 if has_cost else 1, squeeze=False)[0]
    _draw(panels[0], points, "makespan_s", "makespan, s", by_rows=by_rows)
    if has_cost:
        _draw(panels[1], points, "cost", "cost of all machines", by_rows=by_rows)
    panels[0].legend(frameon=False, fontsize=9, loc="best")
    write_caption(figure, caption)
    figure.subplots_adjust(left=0.09, right=0.97, top=0.8, bottom=0.19, wspace=0.25)
    save_png(path, figure)


def _draw(axes: Axes, points: Sequence[ComparedPoint], key: str, label: str, *, by_rows: bool) -> None:
    for number, case in enumerate(dict.fromkeys(one.case for one in points)):
        own = [one for one in points if one.case == case and getattr(one, key) is not None]
        axes.plot(
            [_across(one, by_rows) for one in own],
            [getattr(one, key) for one in own],
            color=COLORS[number % len(COLORS)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=5,
            linewidth=1.8,
            label=case,
            zorder=3,
        )
    axes.set_xlabel("rows of a microbatch" if by_rows else "machines", color=TEXT)
    axes.set_ylabel(label, color=TEXT)
    axes.set_xticks(sorted({_across(one, by_rows) for one in points}))
    axes.set_ylim(bottom=0)
    axes.grid(color=GRID, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    clear_frame(axes)
    axes.spines["bottom"].set_color(FAINT)


def _across(one: ComparedPoint, by_rows: bool) -> int:
    return (one.rows or 0) if by_rows else one.machines
