"""Execution traces as a picture: a row for each worker, prompts and steps as bars over time (DejaVu Fig. 26)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.report.figure_style import COLORS, DPI, FAINT, GRID, TEXT, Caption, clear_frame, save_png, write_caption

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_INCHES, _ROW_INCHES, _MARGIN_INCHES, _GAP_INCHES = 10.0, 0.32, 1.5, 0.75
_LOOKS = {
    "prompt": ("prompt", COLORS[1]),
    "step": ("token step", COLORS[0]),
    "repair": ("dead, being replaced", "#555555"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceBar:
    """One piece of work: ``prompt``, ``step`` or ``repair``. Seconds from the start."""

    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """What one worker did, in order."""

    label: str
    bars: Sequence[TraceBar]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePanel:
    """One run."""

    title: str
    rows: Sequence[TraceRow]
    end_s: float
    """Where its last request ended, which is marked if it lies within the picture."""


def draw_traces(path: Path, panels: Sequence[TracePanel], caption: Caption, *, until_s: float) -> None:
    """``path`` is a PNG of the runs one above the other on one scale of time, up to ``until_s``."""
    from matplotlib.figure import Figure

    rows = [max(1, len(panel.rows)) for panel in panels]
    height = _MARGIN_INCHES + sum(rows) * _ROW_INCHES + len(panels) * _GAP_INCHES
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=DPI, facecolor="white")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": rows})[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw(axes, panel, until_s)
    all_axes[-1].set_xlabel("seconds", color=TEXT)
    all_axes[-1].set_xlim(0, until_s or 1.0)
    _legend(all_axes[0], panels)
    write_caption(figure, caption)
    top, bottom = 1 - 1.05 / height, 0.75 / height
    figure.subplots_adjust(left=0.1, right=0.97, top=top, bottom=bottom, hspace=_GAP_INCHES / _ROW_INCHES / max(rows))
    save_png(path, figure)


def _draw(axes: Axes, panel: TracePanel, until_s: float) -> None:
    for number, row in enumerate(panel.rows):
        for kind, (_, color) in _LOOKS.items():
            bars = [
                (bar.start_s, min(bar.end_s, until_s) - bar.start_s)
                for bar in row.bars
                if bar.kind == kind and bar.start_s < until_s
            ]
            if bars:
                # Steps are too many for edges between them.
                edge = 0.3 if kind == "prompt" else 0.0
                span = (number - 0.4, 0.8)
                axes.broken_barh(bars, span, facecolors=color, edgecolor="white", linewidth=edge, zorder=2)
    if panel.end_s <= until_s:
        axes.axvline(panel.end_s, color=TEXT, linewidth=1.0, zorder=3)
    axes.set_title(panel.title, fontsize=10, loc="left", color=TEXT)
    axes.set_yticks(range(len(panel.rows)), [row.label for row in panel.rows])
    axes.set_ylim(len(panel.rows) - 0.4, -0.6)
    axes.grid(axis="x", color=GRID, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    clear_frame(axes)
    axes.spines["bottom"].set_color(FAINT)


def _legend(axes: Axes, panels: Sequence[TracePanel]) -> None:
    from matplotlib.patches import Patch

    kinds = {bar.kind for panel in panels for row in panel.rows for bar in row.bars}
    handles = [Patch(color=color, label=label) for kind, (label, color) in _LOOKS.items() if kind in kinds]
    if handles:
        axes.legend(
            handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles), frameon=False, fontsize=9
        )
