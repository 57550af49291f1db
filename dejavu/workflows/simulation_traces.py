"""Simulated runs as panels of a picture of traces."""

from __future__ import annotations

from dejavu.report.trace_figure import TraceBar, TracePanel, TraceRow
from dejavu.sim.simulation import SimulationResult


def trace_panel(title: str, result: SimulationResult) -> TracePanel:
    """A run as a panel of a picture of traces."""
    bars: dict[str, list[TraceBar]] = {name: [] for name in result.workers}
    for span in result.spans:
        bars[span.worker].append(TraceBar(kind=span.kind, start_s=span.start_s, end_s=span.end_s))
    for repair in result.repairs:
        for name in repair.workers:
            end_s = result.makespan_s if repair.formed_s is None else repair.formed_s
            bars[name].append(TraceBar(kind="repair", start_s=repair.failed_s, end_s=end_s))
    return TracePanel(
        title=title, rows=[TraceRow(label=name, bars=own) for name, own in bars.items()], end_s=result.makespan_s
    )
