"""``figure.png``: throughput of batch B, of B swapped and of 2B swapped, a panel a model (DejaVu Fig. 13)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.report.figure_style import COLORS, DPI, GRID, TEXT, Caption, clear_frame, save_png, write_caption
from dejavu.report.swap_runs import CASES, RESIDENT, SwapSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GROUP_WIDTH = 0.8
_HEIGHT_INCHES, _LEAST_WIDTH_INCHES, _BAR_INCHES = 4.4, 8.0, 0.5


def draw_swaps(path: Path, summaries: Sequence[SwapSummary], caption: Caption) -> None:
    """``path`` is a PNG; on each bar that swaps stands by how much it is faster than B without."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(one.model for one in summaries))
    batches = list(dict.fromkeys(one.batch for one in summaries))
    width_inches = max(_LEAST_WIDTH_INCHES, len(models) * (1.0 + len(batches) * len(CASES) * _BAR_INCHES))
    figure = Figure(figsize=(width_inches, _HEIGHT_INCHES), dpi=DPI, facecolor="white")
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        _draw(axes, [one for one in summaries if one.model == model], batches)
        axes.set_title(model, fontsize=10.5, loc="left", color=TEXT)
    panels[0].set_ylabel("tokens per second", color=TEXT)
    write_caption(figure, caption)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="lower right", bbox_to_anchor=(0.985, 0.045), ncols=len(labels), frameon=False, fontsize=9
    )
    figure.subplots_adjust(left=0.75 / width_inches, right=1 - 0.3 / width_inches, top=0.78, bottom=0.2, wspace=0.16)
    save_png(path, figure)


def _draw(axes: Axes, own: Sequence[SwapSummary], batches: Sequence[int]) -> None:
    width = _GROUP_WIDTH / len(CASES)
    for number, case in enumerate(CASES):
        label: str | None = case
        for group, batch in enumerate(batches):
            found = next((one for one in own if (one.case, one.batch) == (case, batch)), None)
            if found is None:
                continue
            x = group + (number - (len(CASES) - 1) / 2) * width
            axes.bar(x, found.tokens_per_s, width * 0.92, color=COLORS[number], label=label, zorder=2)
            label = None
            text = f"{found.tokens_per_s:.3g}" if case == RESIDENT else f"{found.gain:.2f}×"
            axes.annotate(
                text, (x, found.tokens_per_s), xytext=(0, 3), textcoords="offset points", ha="center", va="bottom",
                fontsize=8, color=TEXT,
            )  # fmt: skip
    axes.set_xticks(range(len(batches)), [f"B = {batch}" for batch in batches])
    axes.set_ylim(0, 1.12 * max(one.tokens_per_s for one in own))
    clear_frame(axes)
    axes.grid(axis="y", color=GRID, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
