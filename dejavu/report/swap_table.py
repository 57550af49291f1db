"""Throughput with and without swapping over sequence lengths, as a table and a figure (DejaVu Fig. 28 to Fig. 31)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.report.figure_style import COLORS, DPI, FAINT, GRID, TEXT, Caption, clear_frame, save_png, write_caption
from dejavu.report.streaming_table import Columns

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_PANEL_INCHES, _LEAST_INCHES, _HEIGHT_INCHES = 3.4, 8.4, 4.4
_WITHOUT, _WITH = COLORS[1], COLORS[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapPoint:
    """One length and batch size. New tokens per second; None: it does not fit."""

    rows: int
    """B: of a microbatch that is not swapped; a swapped one has 2B."""
    length: int
    """Prompt and answer together."""
    without: float | None
    swapped: float | None
    promised_without: float
    promised_swapped: float
    pays: bool
    """What the rule says."""
    needed: bool
    """2B rows do not fit without swapping."""
    reason: str = ""
    """Why something does not fit."""

    @property
    def gain(self) -> float | None:
        """How many times as fast with swapping."""
        return None if self.without is None or self.swapped is None else self.swapped / self.without

    @property
    def promised_gain(self) -> float:
        """The same by the rule."""
        return self.promised_swapped / self.promised_without


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Up to which length swapping pays for one batch size. None: not within the lengths shown."""

    rule: int | None
    """By the rule's letter."""
    rule_all_rows: int | None
    """By the rule with the KV of all 2B rows in it."""
    simulated: float | None
    """From here on it is slower: the shortest length where it always is; None: not even at the longest."""


def swap_rows(points: Sequence[SwapPoint]) -> list[Columns]:
    """``table.csv``."""
    return [
        {
            "rows": one.rows,
            "length": one.length,
            "without": "-" if one.without is None else one.without,
            "swapped": "-" if one.swapped is None else one.swapped,
            "gain": "-" if one.gain is None else one.gain,
            "rule_without": one.promised_without,
            "rule_swapped": one.promised_swapped,
            "rule_gain": one.promised_gain,
            "rule_pays": "yes" if one.pays else "no",
            "needed": "yes" if one.needed else "no",
        }
        for one in points
    ]


def draw_swapping(path: Path, points: Sequence[SwapPoint], crossings: Mapping[int, Crossing], caption: Caption) -> None:
    """``path`` is a PNG: a panel for each batch size, throughput by length, and a line where the rule says to stop."""
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(one.rows for one in points))
    width = max(_LEAST_INCHES, _PANEL_INCHES * len(sizes))
    figure = Figure(figsize=(width, _HEIGHT_INCHES), dpi=DPI, facecolor="white")
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    for axes, rows in zip(panels, sizes, strict=True):
        _draw(axes, [one for one in points if one.rows == rows], crossings[rows])
        axes.set_title(f"B = {rows}", fontsize=10, color=TEXT, loc="left")
    panels[0].set_ylabel("new tokens/s", color=TEXT)
    shown: dict[str, Artist] = {}
    for axes in panels:
        shown.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)})
    figure.legend(
        list(shown.values()),
        list(shown),
        frameon=False,
        fontsize=8.5,
        loc="lower center",
        ncols=3,
        bbox_to_anchor=(0.5, 0.05),
    )
    write_caption(figure, caption)
    figure.subplots_adjust(left=0.75 / width, right=1 - 0.15 / width, top=0.77, bottom=0.29, wspace=0.22)
    save_png(path, figure)


def _draw(axes: Axes, points: Sequence[SwapPoint], stops: Crossing) -> None:
    lengths = [one.length for one in points]
    for name, color, key, promised in (
        ("B rows, not swapped", _WITHOUT, "without", "promised_without"),
        ("2B rows, swapped", _WITH, "swapped", "promised_swapped"),
    ):
        shown = [one for one in points if getattr(one, key) is not None]
        across, up = [one.length for one in shown], [getattr(one, key) for one in shown]
        axes.plot(across, up, color=color, marker="o", markersize=4, linewidth=1.8, label=name, zorder=3)
        rule = [getattr(one, promised) for one in points]
        axes.plot(lengths, rule, color=color, linestyle=(0, (4, 3)), linewidth=1.1, label=f"{name} (rule)", zorder=2)
    for stop, line, name in (
        (stops.rule, "-", "the rule stops here"),
        (stops.rule_all_rows, (0, (1, 2)), "and here with the KV of all 2B rows"),
    ):
        if stop is not None and lengths[0] <= stop < lengths[-1]:
            axes.axvline(stop, color=FAINT, linestyle=line, linewidth=1.2, label=name, zorder=1)
    axes.set_xlabel("tokens of a request", color=TEXT)
    axes.set_ylim(bottom=0)
    axes.grid(color=GRID, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    clear_frame(axes)
