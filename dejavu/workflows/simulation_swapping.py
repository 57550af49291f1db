"""``simulate.compare.over=swapping``: the benefit of swapping by length and batch size (DejaVu Fig. 28 to Fig. 31)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import shorten

from rich.console import Console

from dejavu.clock import SystemClock
from dejavu.config import Config
from dejavu.config.strategy import MicrobatchConfig
from dejavu.errors import InfeasibleError
from dejavu.ids import RequestId
from dejavu.planning.costs import Costs
from dejavu.planning.shape import ModelShape
from dejavu.planning.swap_benefit import SwapQuestion, slower_from
from dejavu.report.figure_style import Caption
from dejavu.report.json_file import write_json
from dejavu.report.progress import RichProgress
from dejavu.report.streaming_table import as_text, write_table
from dejavu.report.swap_table import Crossing, SwapPoint, draw_swapping, swap_rows
from dejavu.request import Request
from dejavu.sim.simulation import simulate
from dejavu.workflows.plan import model_shape
from dejavu.workflows.simulation_inputs import costs_of, plan_of, setting_of

_BITS_PER_GIGABYTE_S = 10**9 / 8


def compare_swapping(config: Config, output: Path, console: Console) -> None:
    """``table.csv``, ``comparison.json`` and ``figure.png`` are in ``output``; what does not fit is named.

    Raises InfeasibleError where some point does not fit, after the others are in ``output``.
    """
    shape, _ = model_shape(config)
    costs, compare = costs_of(config, shape), config.simulate.compare
    asked = [(rows, length) for rows in compare.microbatches for length in compare.lengths]
    points = []
    with RichProgress(Console(stderr=True), SystemClock()) as progress:
        for number, (rows, length) in enumerate(asked):
            progress.phase("simulating", number, len(asked))
            points.append(_point(config, shape, costs, rows, length))
        progress.phase("simulating", len(asked), len(asked))
    crossings = {rows: _crossing(config, shape, costs, points, rows) for rows in compare.microbatches}
    _write(config, points, crossings, costs, output, console)


def _point(config: Config, shape: ModelShape, costs: Costs, rows: int, length: int) -> SwapPoint:
    question = _question(config, shape, costs, rows)
    without, reason = _tokens_per_s(config, shape, costs, rows, length, is_swapping=False)
    swapped, swapped_reason = _tokens_per_s(config, shape, costs, 2 * rows, length, is_swapping=True)
    promised_without, promised_swapped = question.promised(length)
    return SwapPoint(
        rows=rows,
        length=length,
        without=without,
        swapped=swapped,
        promised_without=promised_without,
        promised_swapped=promised_swapped,
        pays=question.rule(length).pays,
        needed=not _fits(_arranged(config, 2 * rows, is_swapping=False), replace(shape, max_length=length)),
        reason=reason or swapped_reason,
    )


def _question(
    config: Config, shape: ModelShape, costs: Costs, rows: int, *, moved_rows: int | None = None
) -> SwapQuestion:
    assert config.cluster.pcie_gbps is not None
    assert config.workload.prompt_tokens is not None
    return SwapQuestion(
        costs=costs,
        depth=config.strategy.stages,
        rows=rows,
        prompt_tokens=config.workload.prompt_tokens,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        pcie_bytes_per_s=config.cluster.pcie_gbps * _BITS_PER_GIGABYTE_S,
        moved_rows=moved_rows,
    )


def _tokens_per_s(
    config: Config, shape: ModelShape, costs: Costs, rows: int, length: int, *, is_swapping: bool
) -> tuple[float | None, str]:
    """Of whole rounds of microbatches, the same requests for B and 2B rows; or None and why it does not fit.

    A row is as long as the request: room for longer ones would only make fewer fit.
    """
    own = _arranged(config, rows, is_swapping=is_swapping)
    num_requests = (1 if is_swapping else 2) * rows * config.strategy.stages
    prompt = (0,) * (config.workload.prompt_tokens or 0)
    requests = [
        Request(id=RequestId(f"r{number}"), prompt_tokens=prompt, max_tokens=length - len(prompt), ignore_eos=True)
        for number in range(num_requests)
    ]
    try:
        result = simulate(setting_of(own, replace(shape, max_length=length), costs), requests)
    except InfeasibleError as error:
        return None, str(error).partition("\n")[0]
    return result.num_tokens / result.makespan_s, ""


def _fits(config: Config, shape: ModelShape) -> bool:
    try:
        plan_of(config, shape)
    except InfeasibleError:
        return False
    return True


def _arranged(config: Config, rows: int, *, is_swapping: bool) -> Config:
    """The declared pipeline with microbatches of so many rows, one in flight for each stage."""
    strategy = replace(
        config.strategy,
        microbatch=MicrobatchConfig(prompt=rows, prompt_tokens=None, token=rows),
        in_flight=config.strategy.stages,
    )
    return replace(config, strategy=strategy, simulate=replace(config.simulate, swapping=is_swapping, timeline_spans=0))


def _crossing(config: Config, shape: ModelShape, costs: Costs, points: Sequence[SwapPoint], rows: int) -> Crossing:
    most = max(config.simulate.compare.lengths)
    own = [(one.length, one.gain) for one in points if one.rows == rows and one.gain is not None]
    return Crossing(
        rule=_question(config, shape, costs, rows).longest_paying(most),
        rule_all_rows=_question(config, shape, costs, rows, moved_rows=2 * rows).longest_paying(most),
        simulated=slower_from([length for length, _ in own], [gain for _, gain in own]),
    )


def _write(
    config: Config,
    points: Sequence[SwapPoint],
    crossings: Mapping[int, Crossing],
    costs: Costs,
    output: Path,
    console: Console,
) -> None:
    rows = swap_rows(points)
    write_table(output / "table.csv", rows)
    write_json(
        output / "comparison.json",
        {
            "points": [{**asdict(one), "gain": one.gain, "promised_gain": one.promised_gain} for one in points],
            "crossings": crossings,
            "costs": costs.source,
        },
    )
    draw_swapping(output / "figure.png", points, crossings, _caption(config, costs))
    console.print(as_text(rows))
    for size, stops in crossings.items():
        console.print(
            f"B = {size}: the gain is below 1 {_shown(stops.simulated, config)}; the rule says "
            f"{_until(stops.rule, config)}, and {_until(stops.rule_all_rows, config)} with all {2 * size} rows in it",
            highlight=False,
            soft_wrap=True,
        )
    failed = [one for one in points if one.reason]
    for one in failed:
        console.print(f"B = {one.rows}, {one.length} tokens: {one.reason}", highlight=False, markup=False)
    if failed:
        raise InfeasibleError(f"{len(failed)} of {len(points)} points failed, for the reasons above; output: {output}")


def _shown(length: float | None, config: Config) -> str:
    if length is None:
        return "not even at the longest length that fits"
    is_first = length <= min(config.simulate.compare.lengths)
    return "at all of these lengths" if is_first else f"from {length:.0f} tokens on"


def _until(length: int | None, config: Config) -> str:
    if length is None:
        return "never to swap"
    return "always to swap" if length == max(config.simulate.compare.lengths) else f"to swap up to {length}"


def _caption(config: Config, costs: Costs) -> Caption:
    strategy, cluster = config.strategy, config.cluster
    devices = "the device" if cluster.devices_per_machine == 1 else f"{cluster.devices_per_machine} devices"
    return Caption(
        title=f"{config.model.kind} on {strategy.stages} stages: swapping, simulated",
        subtitle=f"prompts of {config.workload.prompt_tokens} tokens; "
        f"{cluster.pcie_gbps:g} Gbit/s between the host and {devices} of a stage",
        source=shorten(f"times {config.profile.effective_kind.value}: {costs.source}", 140, placeholder=" …"),
    )
