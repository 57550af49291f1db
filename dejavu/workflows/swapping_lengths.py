"""Where swapping stops to pay: the measured gains of a run of ``workflow=swapping`` beside the rule's (Appendix E)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from dejavu.config import Config
from dejavu.planning.swap_benefit import slower_from
from dejavu.planning.swapping import SwapInputs, swap_rule
from dejavu.report.figure_style import Caption
from dejavu.report.json_file import write_json
from dejavu.report.streaming_table import as_text, write_table
from dejavu.report.swap_lengths import LengthPoint, Stops, draw_lengths, length_rows
from dejavu.report.swap_runs import DOUBLE, RESIDENT, SwapSummary
from dejavu.workflows.swapping_case import Case

_BYTES_PER_S = 1e12


def write_lengths(
    config: Config,
    groups: Sequence[Sequence[Case]],
    summaries: Sequence[SwapSummary],
    caption: Caption,
    output: Path,
    console: Console,
) -> None:
    """``table.csv``, ``stops.json`` and ``figure.png`` are in ``output``; the table and the stops on the console."""
    seconds_of = {cases[0].model: stage_seconds_per_token(cases[0]) for cases in groups}
    points = points_of(summaries, config.workload.prompt_tokens or 0, seconds_of)
    stops = stops_of(points)
    rows = length_rows(points)
    write_table(output / "table.csv", rows)
    write_json(
        output / "stops.json",
        [
            {"model": model, "batch": batch, **asdict(found), "off_percent": found.off_percent}
            for (model, batch), found in stops.items()
        ],
    )
    draw_lengths(output / "figure.png", points, stops, caption)
    console.print(as_text(rows))
    for (model, batch), found in stops.items():
        console.print(
            f"{model}, B = {batch}: 2B with swapping is slower {found.words(found.measured)}; by the rule with all "
            f"rows {found.words(found.full_rule)}, by its letter {found.words(found.rule)}",
            highlight=False,
            soft_wrap=True,
        )


def stage_seconds_per_token(case: Case) -> float:
    """Over the bus, of one row, in the layers of the stage that has most of them."""
    plan = case.prepared.plan
    assert plan.bus_bytes_per_s is not None
    most_layers = max(len(stage.layers) for stage in plan.token_pipeline.stages)
    return most_layers * plan.model.layout.position_bytes / plan.bus_bytes_per_s


def points_of(summaries: Sequence[SwapSummary], prompt: int, seconds_of: Mapping[str, float]) -> list[LengthPoint]:
    """A point for each model, batch and length, in the order in which they came.

    ``seconds_of``: by model, a token of a row over the bus of a stage.
    """
    found = {(one.model, one.batch, one.length, one.case): one for one in summaries}
    points = []
    for place in dict.fromkeys((one.model, one.batch, one.length) for one in summaries):
        resident, double = found[*place, RESIDENT], found[*place, DOUBLE]

        def inputs(rows: int, step_s: float, one: SwapSummary = resident) -> SwapInputs:
            return SwapInputs(
                rows=rows,
                token_time_s=step_s,
                prompt_tokens=prompt,
                num_new_tokens=one.length - prompt,
                # The rule asks for their quotient alone.
                kv_bytes_per_token=round(seconds_of[one.model] * _BYTES_PER_S),
                pcie_bytes_per_s=_BYTES_PER_S,
            )

        letter = swap_rule(inputs(resident.rows, resident.step_s))
        full = swap_rule(inputs(double.rows, double.step_s))
        without_s = 2 * resident.prompt_s + letter.without_s
        points.append(
            LengthPoint(
                model=resident.model,
                batch=resident.batch,
                length=resident.length,
                tokens_per_s=resident.tokens_per_s,
                swapped_tokens_per_s=double.tokens_per_s,
                gains=double.gains,
                gain=double.gain,
                rule_gain=without_s / (2 * resident.prompt_s + letter.with_s),
                full_rule_gain=without_s / (double.prompt_s + full.with_s),
            )
        )
    return points


def stops_of(points: Sequence[LengthPoint]) -> dict[tuple[str, int], Stops]:
    """By model and batch."""
    stops = {}
    for model, batch in dict.fromkeys((one.model, one.batch) for one in points):
        own = sorted((one for one in points if (one.model, one.batch) == (model, batch)), key=lambda one: one.length)
        lengths = [one.length for one in own]
        stops[model, batch] = Stops(
            shortest=lengths[0],
            measured=slower_from(lengths, [one.gain for one in own]),
            rule=slower_from(lengths, [one.rule_gain for one in own]),
            full_rule=slower_from(lengths, [one.full_rule_gain for one in own]),
        )
    return stops
