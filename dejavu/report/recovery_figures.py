"""Figures of what failures cost: tokens of one microbatch over time, or requests over time, a line for each case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dejavu.report.figure_style import COLORS, DPI, FAINT, GRID, TEXT, Caption, clear_frame, save_png, write_caption
from dejavu.report.recovery_runs import NONE, RECOMPUTE, REPLICA, RESTART, CaseSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE_INCHES = (8.0, 4.6)
_LOOKS = {
    NONE: ("no failure", "#555555", (0, (4, 3))),
    REPLICA: ("from replicas", COLORS[0], "-"),
    RECOMPUTE: ("recomputed", COLORS[2], "-"),
    RESTART: ("restarted", COLORS[1], "-"),
}
"""Name, colour and line of each case."""


def draw_tokens(path: Path, summaries: Sequence[CaseSummary], caption: Caption) -> None:
    """``path`` is a PNG of the cumulative latency of a microbatch (DejaVu Fig. 4, Fig. 14): seconds by token."""
    figure, axes = _figure(caption)
    for one in summaries:
        curve_s = one.typical.token_curve_s
        _line(axes, one, range(1, len(curve_s) + 1), curve_s)
    axes.set_xlabel("token of each row", color=TEXT)
    axes.set_ylabel("seconds since serving began", color=TEXT)
    _finish(path, figure, axes, legend="upper left")


def draw_requests(path: Path, summaries: Sequence[CaseSummary], caption: Caption) -> None:
    """``path`` is a PNG of the requests completed over time (DejaVu Fig. 15), with the failures as lines."""
    figure, axes = _figure(caption)
    for one in summaries:
        ends_s = one.typical.end_curve_s
        _line(axes, one, (0.0, *ends_s), range(len(ends_s) + 1), steps=True)
        for at_s in one.typical.failures_s:
            axes.axvline(at_s, color=_LOOKS[one.case][1], linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    axes.set_xlabel("seconds since serving began (dotted: a worker dies)", color=TEXT)
    axes.set_ylabel("requests completed", color=TEXT)
    _finish(path, figure, axes, legend="lower right")


def _figure(caption: Caption) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=DPI, facecolor="white")
    axes = figure.subplots()
    write_caption(figure, caption)
    return figure, axes


def _line(
    axes: Axes, one: CaseSummary, across: Sequence[float] | range, up: Sequence[float] | range, *, steps: bool = False
) -> None:
    name, color, line = _LOOKS[one.case]
    label = f"{name}: {one.latency_s:.1f} s" + ("" if one.case == NONE else f" ({one.ratio:.2f}×)")
    drawing = "steps-post" if steps else "default"
    axes.plot(
        list(across), list(up), color=color, linestyle=line, linewidth=1.8, label=label, drawstyle=drawing, zorder=3
    )


def _finish(path: Path, figure: Figure, axes: Axes, *, legend: Literal["upper left", "lower right"]) -> None:
    axes.grid(color=GRID, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    clear_frame(axes)
    axes.spines["left"].set_visible(True)
    axes.spines["left"].set_color(FAINT)
    axes.legend(frameon=False, fontsize=9, loc=legend)
    figure.subplots_adjust(left=0.09, right=0.96, top=0.83, bottom=0.19)
    save_png(path, figure)
