"""A load on an endpoint as a picture: which share of requests, or of gaps between tokens, took at most how long."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.report.amounts import show_seconds
from dejavu.report.figure_style import (
    COLORS,
    DPI,
    FAINT,
    GRID,
    SOURCE,
    TEXT,
    Caption,
    clear_frame,
    save_png,
    write_caption,
)
from dejavu.report.load import Limits, Sample
from dejavu.report.metrics import quantile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (10.5, 4.4)
_MARKS = (0.5, 0.95, 0.99)
_BEYOND = 1.2


def draw_load(path: Path, samples: Sequence[Sample], limits: Limits, caption: Caption) -> None:
    """``path`` is a PNG of the finished requests' latencies as cumulative distributions."""
    from matplotlib.figure import Figure

    finished = [sample for sample in samples if sample.error is None]
    panels = (
        ("time to first token", [one.ttft_s for one in finished if one.ttft_s is not None], limits.ttft_s),
        ("time per output token", [one.tpot_s for one in finished if one.tpot_s is not None], limits.tpot_s),
        ("between tokens", [gap for one in finished for gap in one.gaps_s], None),
        ("end to end", [one.end_to_end_s for one in finished], limits.end_to_end_s),
    )
    figure = Figure(figsize=_SIZE_INCHES, dpi=DPI, facecolor="white")
    all_axes = figure.subplots(1, len(panels), sharey=True)
    for axes, (title, values_s, limit_s) in zip(all_axes, panels, strict=True):
        _draw(axes, title, values_s, limit_s)
    all_axes[0].set_ylabel("share", color=TEXT)
    write_caption(figure, caption)
    figure.subplots_adjust(left=0.06, right=0.98, top=0.72, bottom=0.21, wspace=0.12)
    save_png(path, figure)


def _draw(axes: Axes, title: str, values_s: Sequence[float], limit_s: float | None) -> None:
    ordered = sorted(values_s)
    axes.set_title(title, fontsize=10, loc="left", color=TEXT, pad=20)
    axes.set_xlabel("seconds", color=TEXT, fontsize=9)
    axes.set_ylim(0, 1.02)
    axes.grid(color=GRID, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    if ordered:
        _draw_shares(axes, ordered, limit_s)
    clear_frame(axes)
    axes.spines["bottom"].set_color(FAINT)


def _draw_shares(axes: Axes, ordered_s: Sequence[float], limit_s: float | None) -> None:
    """The curve up to a little beyond its last mark: one request that hung would flatten all others."""
    shares = [(place + 1) / len(ordered_s) for place in range(len(ordered_s))]
    axes.step([0.0, *ordered_s], [0.0, *shares], where="post", color=COLORS[0], linewidth=1.8, zorder=3)
    marks = [(share, quantile(ordered_s, share) or 0.0) for share in _MARKS]
    axes.plot(
        [value for _, value in marks], [share for share, _ in marks], "o", markersize=4, color=COLORS[0], zorder=4
    )
    told = "   ".join(f"p{share * 100:.0f} {show_seconds(value)}" for share, value in marks)
    axes.text(0.0, 1.03, told, transform=axes.transAxes, fontsize=7.5, color=SOURCE, va="bottom")
    axes.set_xlim(0, max(_BEYOND * marks[-1][1], 1.05 * (limit_s or 0.0)) or 1.0)
    if limit_s is not None:
        axes.axvline(limit_s, color=COLORS[1], linewidth=1.4, linestyle="--", zorder=2)
        axes.text(limit_s, 0.02, "limit ", fontsize=8, color=COLORS[1], ha="right", va="bottom")
