"""What all figures share: colours, what stands around them, and how they become a file.

Matplotlib's ``Figure`` alone, without pyplot: it keeps no global state and needs no display.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.report.json_file import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
"""Told apart by everyone, also in grey."""
TEXT, FAINT, GRID, SOURCE = "#222222", "#9a9a9a", "#e4e4e4", "#666666"
DPI = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Caption:
    """What stands over and under a figure."""

    title: str
    subtitle: str
    source: str
    """Machine and date."""


def write_caption(figure: Figure, caption: Caption) -> None:
    """Title and subtitle stand over the figure, the source under it."""
    figure.suptitle(caption.title, x=0.02, y=0.975, ha="left", fontsize=13, fontweight="bold", color=TEXT)
    figure.text(0.02, 0.885, caption.subtitle, ha="left", fontsize=9.5, color=TEXT)
    figure.text(0.02, 0.025, caption.source, ha="left", fontsize=7.5, color=SOURCE)


def clear_frame(axes: Axes) -> None:
    """The axes have no frame but their base line."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=TEXT, labelsize=9, length=0)


def save_png(path: Path, figure: Figure) -> None:
    """``path`` is the figure as PNG, whole or not at all."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI)
    replace_file(path, content.getvalue())
