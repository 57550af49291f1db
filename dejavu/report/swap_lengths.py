"""The gain of swapping over the length of requests, measured and by the rule, as a table and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.report.figure_style import COLORS, DPI, FAINT, GRID, TEXT, Caption, clear_frame, save_png, write_caption
from dejavu.report.streaming_table import Columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL_INCHES, _LEAST_INCHES, _HEIGHT_INCHES = 3.4, 8.4, 4.4


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPoint:
    """One length and batch size of one model."""

    model: str
    batch: int
    """B."""
    length: int
    tokens_per_s: float
    """Of B rows without swapping."""
    swapped_tokens_per_s: float
    """Of 2B rows with it."""
    gains: tuple[float, ...]
    """Of each round."""
    gain: float
    rule_gain: float
    """By the rule's letter: the step's time of B rows, the KV of B rows."""
    full_rule_gain: float
    """With the measured time of 2B rows, and the KV of all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """From which length on 2B rows with swapping are slower; None: not even at the longest that was measured."""

    shortest: int
    """That was measured; who stops there may have stopped before."""
    measured: float | None
    rule: float | None
    full_rule: float | None

    @property
    def off_percent(self) -> float | None:
        """By how much the measured length is off the rule with all rows in it; None where one of them is not known."""
        if self.measured is None or self.full_rule is None or min(self.measured, self.full_rule) <= self.shortest:
            return None
        return (self.measured / self.full_rule - 1) * 100

    def words(self, stop: float | None) -> str:
        """One of the three, after "is slower"."""
        if stop is None:
            return "not even at the longest of these lengths"
        return "at all of these lengths" if stop <= self.shortest else f"from {stop:.0f} tokens on"


def length_rows(points: Sequence[LengthPoint]) -> list[Columns]:
    """``table.csv``."""
    return [
        {
            "model": one.model,
            "batch": one.batch,
            "length": one.length,
            "tokens_per_s": one.tokens_per_s,
            "swapped_tokens_per_s": one.swapped_tokens_per_s,
            "gain": one.gain,
            "rule_gain": one.rule_gain,
            "full_rule_gain": one.full_rule_gain,
        }
        for one in points
    ]


def draw_lengths(
    path: Path, points: Sequence[LengthPoint], stops: Mapping[tuple[str, int], Stops], caption: Caption
) -> None:
    """``path`` is a PNG: a panel for each model and B, measured points over the rule's two lines."""
    from matplotlib.figure import Figure

    width_inches = max(_LEAST_INCHES, _PANEL_INCHES * len(stops))
    figure = Figure(figsize=(width_inches, _HEIGHT_INCHES), dpi=DPI, facecolor="white")
    panels = figure.subplots(1, len(stops), sharey=True, squeeze=False)[0]
    for axes, ((model, batch), found) in zip(panels, stops.items(), strict=True):
        _draw(axes, [one for one in points if (one.model, one.batch) == (model, batch)], found)
        axes.set_title(f"{model}, B = {batch}", fontsize=10.5, loc="left", color=TEXT)
        axes.set_xlabel("tokens of a request", color=TEXT, fontsize=9)
    panels[0].set_ylabel("2B swapped / B", color=TEXT)
    panels[0].set_ylim(bottom=0)
    write_caption(figure, caption)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="lower right", bbox_to_anchor=(0.985, 0.045), ncols=len(labels), frameon=False, fontsize=9
    )
    figure.subplots_adjust(left=0.75 / width_inches, right=1 - 0.3 / width_inches, top=0.78, bottom=0.24, wspace=0.08)
    save_png(path, figure)


def _draw(axes: Axes, own: Sequence[LengthPoint], stops: Stops) -> None:
    lengths = [one.length for one in own]
    axes.axhline(1.0, color=FAINT, linewidth=1.0, zorder=1)
    axes.plot(lengths, [one.rule_gain for one in own], color=FAINT, linestyle="--", label="rule", zorder=2)
    full = [one.full_rule_gain for one in own]
    axes.plot(lengths, full, color=COLORS[1], linewidth=1.6, label="rule with all 2B rows", zorder=2)
    axes.vlines(lengths, [min(one.gains) for one in own], [max(one.gains) for one in own], color=TEXT, zorder=3)
    axes.plot(lengths, [one.gain for one in own], "o", color=COLORS[0], markersize=6, label="measured", zorder=4)
    if stops.measured is not None:
        axes.axvline(stops.measured, color=COLORS[0], linewidth=1.0, linestyle=":", zorder=1)
    axes.set_xlim(left=0)
    clear_frame(axes)
    axes.grid(color=GRID, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
