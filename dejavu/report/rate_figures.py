"""Throughput and normalized latency over offered rate, as a figure of two panels (DejaVu Fig. 12)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.report.figure_style import COLORS, DPI, FAINT, GRID, TEXT, Caption, clear_frame, save_png, write_caption
from dejavu.report.rate_runs import LIVE, SIMULATED, RatePoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (9.6, 4.7)
_LOOKS = {"colocated": (COLORS[1], "s"), "disaggregated": (COLORS[0], "o")}


def draw_rates(
    path: Path, points: Sequence[RatePoint], planned: Mapping[str, float], labels: Mapping[str, str], caption: Caption
) -> None:
    """``path`` is a PNG: live runs as lines with marks, simulated ones dashed, the planner's promise dotted.

    Args:
        planned: the most new tokens per second by case.
        labels: the name of each case.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    figure = Figure(figsize=_SIZE_INCHES, dpi=DPI, facecolor="white")
    left, right = figure.subplots(1, 2)
    for case, label in labels.items():
        color, _ = _LOOKS[case]
        _lines(left, points, case, label, "tokens_per_s")
        _lines(right, points, case, label, "normalized_s")
        if case in planned:
            left.axhline(planned[case], color=color, linestyle=(0, (1, 2)), linewidth=1.2, label=f"{label}, planned")
    left.set_ylabel("new tokens/s", color=TEXT)
    left.set_ylim(bottom=0)
    right.set_ylabel("seconds per new token, mean", color=TEXT)
    right.set_yscale("log")
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    right.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    right.yaxis.set_minor_locator(NullLocator())
    for axes in (left, right):
        axes.set_xlabel("offered requests/s", color=TEXT)
        axes.grid(color=GRID, linewidth=0.7, zorder=0)
        axes.set_axisbelow(True)
        clear_frame(axes)
        axes.spines["bottom"].set_color(FAINT)
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, fontsize=8.5, loc="lower center", ncols=3, bbox_to_anchor=(0.5, 0.05))
    write_caption(figure, caption)
    figure.subplots_adjust(left=0.08, right=0.98, top=0.82, bottom=0.28, wspace=0.24)
    save_png(path, figure)


def _lines(axes: Axes, points: Sequence[RatePoint], case: str, label: str, key: str) -> None:
    color, marker = _LOOKS[case]
    for source, line, width in ((LIVE, "-", 1.8), (SIMULATED, (0, (4, 3)), 1.2)):
        own = [one for one in points if one.case == case and one.source == source]
        if own:
            axes.plot(
                [one.rate for one in own],
                [getattr(one, key) for one in own],
                color=color,
                linestyle=line,
                linewidth=width,
                marker=marker,
                markersize=5 if source == LIVE else 3,
                label=f"{label}, {source}",
                zorder=3,
            )
