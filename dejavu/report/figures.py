"""``figure.png``: slowdowns by streaming as bars, a panel a model, a colour a destination."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.report.figure_style import COLORS, DPI, FAINT, GRID, TEXT, Caption, clear_frame, save_png, write_caption
from dejavu.report.streaming_table import FULL, OFF, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GROUP_WIDTH = 0.8
_BAR_INCHES, _PANEL_MARGIN_INCHES, _HEIGHT_INCHES = 0.5, 0.6, 4.4
_LEAST_WIDTH_INCHES = 8.0
_LOG_FROM_SLOWDOWN = 3.0
"""Bars that differ by more cannot share a linear axis."""
_PAPER_PERCENT = 2.0
"""What the paper stays within (DejaVu, appendix D)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    """A bar from its base, the span of the rounds, and what is written on it."""

    value: float
    low: float
    high: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bars:
    """The bars of one destination in one panel; None where nothing was measured."""

    name: str
    bars: Sequence[_Bar | None]


def draw_levels(path: Path, summaries: Sequence[Summary], caption: Caption) -> None:
    """``path`` is a PNG of the slowdown of each level (DejaVu Fig. 11), logarithmic where naive is far off."""
    models, destinations = _names(summaries, "model"), _names(summaries, "destination")
    levels = _names(summaries, "level")
    is_log = max(max(one.slowdowns) for one in summaries) > _LOG_FROM_SLOWDOWN
    figure, panels = _panels(len(models), len(levels) * len(destinations), caption)
    for axes, model in zip(panels, models, strict=True):
        axes.set_yscale("log" if is_log else "linear")
        series = [
            _Bars(
                name=destination,
                bars=[_ratio(_find(summaries, model, destination, level=level)) for level in levels],
            )
            for destination in destinations
        ]
        _draw(axes, model, levels, series, base=1.0)
        axes.axhline(1.0, color=FAINT, linewidth=1.0, zorder=1)
    _mark_ratios(panels, is_log=is_log)
    panels[0].set_ylabel(f"latency / latency of {OFF}", color=TEXT)
    _set_limits(panels, is_log=is_log)
    _save(path, figure, panels, caption)


def draw_batches(path: Path, summaries: Sequence[Summary], caption: Caption) -> None:
    """``path`` is a PNG of what ``full`` adds to the latency of ``off``, by batch size (DejaVu Fig. 27)."""
    models, destinations = _names(summaries, "model"), _names(summaries, "destination")
    batches = list(dict.fromkeys(one.batch for one in summaries))
    figure, panels = _panels(len(models), len(batches) * len(destinations), caption)
    for axes, model in zip(panels, models, strict=True):
        series = [
            _Bars(
                name=destination,
                bars=[_percent(_find(summaries, model, destination, level=FULL, batch=batch)) for batch in batches],
            )
            for destination in destinations
        ]
        _draw(axes, model, [f"batch {batch}" for batch in batches], series, base=0.0)
        axes.axhline(0.0, color=FAINT, linewidth=1.0, zorder=1)
        axes.axhline(_PAPER_PERCENT, color=FAINT, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    panels[0].set_ylabel(f"latency of {FULL} above {OFF}, %", color=TEXT)
    panels[-1].annotate(
        f"{_PAPER_PERCENT:g} %", (1.0, _PAPER_PERCENT), xycoords=panels[-1].get_yaxis_transform(),
        xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, color=FAINT,
    )  # fmt: skip
    _set_limits(panels, is_log=False)
    _save(path, figure, panels, caption)


def _names(summaries: Sequence[Summary], key: str) -> list[str]:
    return list(dict.fromkeys(str(getattr(one, key)) for one in summaries))


def _find(
    summaries: Sequence[Summary], model: str, destination: str, *, level: str, batch: int | None = None
) -> Summary | None:
    for one in summaries:
        if (one.model, one.destination, one.level) == (model, destination, level) and batch in (None, one.batch):
            return one
    return None


def _ratio(summary: Summary | None) -> _Bar | None:
    if summary is None:
        return None
    slowdown = summary.slowdown
    digits = 2 if slowdown < 10 else 1 if slowdown < 100 else 0
    return _Bar(
        value=slowdown,
        low=min(summary.slowdowns),
        high=max(summary.slowdowns),
        label=f"{slowdown:.{digits}f}×",
    )


def _percent(summary: Summary | None) -> _Bar | None:
    if summary is None:
        return None
    low, value, high = ((slowdown - 1.0) * 100 for slowdown in _spread(summary))
    # Adding 0 makes the negative zero of rounding a plain one.
    return _Bar(value=value, low=low, high=high, label=f"{round(value, 1) + 0.0:+.1f} %")


def _spread(summary: Summary) -> tuple[float, float, float]:
    return min(summary.slowdowns), summary.slowdown, max(summary.slowdowns)


def _panels(num_panels: int, bars_a_panel: int, caption: Caption) -> tuple[Figure, list[Axes]]:
    """A figure with the panels side by side on one scale, and its title over them."""
    from matplotlib.figure import Figure

    width_inches = num_panels * (_PANEL_MARGIN_INCHES + bars_a_panel * _BAR_INCHES)
    figure = Figure(figsize=(max(_LEAST_WIDTH_INCHES, width_inches), _HEIGHT_INCHES), dpi=DPI, facecolor="white")
    panels = figure.subplots(1, num_panels, sharey=True, squeeze=False)[0]
    write_caption(figure, caption)
    return figure, list(panels)


def _draw(axes: Axes, model: str, groups: Sequence[str], series: Sequence[_Bars], *, base: float) -> None:
    """The panel has a group of bars for each of ``groups``, a bar for each of ``series`` in it."""
    width = _GROUP_WIDTH / len(series)
    for number, one in enumerate(series):
        color = COLORS[number % len(COLORS)]
        label: str | None = one.name
        for group, bar in enumerate(one.bars):
            if bar is None:
                continue
            x = group + (number - (len(series) - 1) / 2) * width
            axes.bar(x, bar.value - base, width * 0.92, bottom=base, color=color, label=label, zorder=2)
            label = None
            axes.vlines(x, bar.low, bar.high, color=TEXT, linewidth=1.2, zorder=3)
            axes.annotate(
                bar.label, (x, max(bar.high, base)), xytext=(0, 3), textcoords="offset points",
                ha="center", va="bottom", fontsize=8, color=TEXT,
            )  # fmt: skip
    axes.set_title(model, fontsize=10.5, loc="left", color=TEXT)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlim(-0.5, len(groups) - 0.5)
    clear_frame(axes)
    axes.grid(axis="y", color=GRID, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)


def _mark_ratios(panels: Sequence[Axes], *, is_log: bool) -> None:
    """The axis counts in times, on a logarithmic scale at 1, 2, 5, 10 and so on."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for axes in panels:
        if is_log:
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))


def _set_limits(panels: Sequence[Axes], *, is_log: bool) -> None:
    """Room above the highest label and below the lowest bar, the same in every panel."""
    low, high = panels[0].get_ylim()
    if is_log:
        panels[0].set_ylim(min(low, 0.8), high * 1.3)
    else:
        margin = 0.08 * (high - low)
        panels[0].set_ylim(low - margin, high + margin)


def _save(path: Path, figure: Figure, panels: Sequence[Axes], caption: Caption) -> None:
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, title="KV streamed to", loc="upper right", bbox_to_anchor=(0.985, 0.99), ncols=len(labels),
        frameon=False, fontsize=9, title_fontsize=9, alignment="left",
    )  # fmt: skip
    width_inches = figure.get_figwidth()
    figure.subplots_adjust(left=0.75 / width_inches, right=1 - 0.4 / width_inches, top=0.78, bottom=0.155, wspace=0.06)
    save_png(path, figure)
