"""``workflow=swapping``: in the same device memory, batch B against B and 2B that are swapped (DejaVu Fig. 13).

Rounds, in each of which every case of a model and batch serves the same requests on a fresh cluster.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console

from dejavu.clock import Clock, SystemClock
from dejavu.config import Config
from dejavu.models.spec import ModelSpec
from dejavu.report.figure_style import Caption
from dejavu.report.machine import machine
from dejavu.report.progress import RichProgress
from dejavu.report.streaming_table import as_text, shown, write_table
from dejavu.report.swap_figure import draw_swaps
from dejavu.report.swap_runs import RESIDENT, SwapRun, summarise_swaps, swap_rows
from dejavu.workflows.fresh_folder import check_fresh
from dejavu.workflows.streaming_case import BatchBar
from dejavu.workflows.swapping_case import Answers, Case, check_same, prepare_cases, run_case
from dejavu.workflows.swapping_lengths import write_lengths

logger = logging.getLogger(__name__)


def run(config: Config, output: Path) -> None:
    """``table.csv``, ``rounds.csv`` and ``figure.png`` are in ``output``, and each run's own files under ``cases/``.

    An interrupted or failed run leaves the runs of ``rounds.csv`` that were measured.
    Raises DejavuError when a cluster failed or, in float32, swapping changed an answer.
    """
    check_fresh(output / "cases")
    console, clock = Console(), SystemClock()
    with RichProgress(Console(stderr=True), clock) as progress:
        groups = prepare_cases(config, progress)
        bar = BatchBar(progress, config.swap.repeats * sum(map(len, groups)))
        runs: list[SwapRun] = []
        for round_index in range(config.swap.repeats):
            for cases in groups:
                answers: dict[str, Answers] = {}
                first = round_index % len(cases)
                for turn, case in enumerate([*cases[first:], *cases[:first]]):
                    bar.begin(f"{case.label}, round {round_index + 1} of {config.swap.repeats}")
                    folder = output / "cases" / f"{case.label}-{round_index + 1}"
                    one, got = run_case(case, folder, progress, clock, round_index=round_index, turn=turn)
                    bar.end()
                    runs.append(one)
                    answers[case.name] = got
                    write_rounds(output / "rounds.csv", runs)
                    logger.info("%s, round %s: %.4g tokens/s", case.label, round_index + 1, one.tokens_per_s)
                compare(cases, answers)
    summaries = summarise_swaps(runs, config.strategy.stages)
    caption = _caption(config, groups[0][0].prepared.plan.model, clock)
    if config.swap.lengths is None:
        rows = swap_rows(summaries)
        write_table(output / "table.csv", rows)
        draw_swaps(output / "figure.png", summaries, caption)
        console.print(as_text(rows))
    else:
        write_lengths(config, groups, summaries, caption, output, console)
    console.print(f"output: {output}", highlight=False, soft_wrap=True)


def write_rounds(path: Path, runs: Sequence[SwapRun]) -> None:
    """The newest run is a line of ``path``, which begins with a heading."""
    columns = runs[-1].columns
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(columns), lineterminator="\n")
        if len(runs) == 1:
            writer.writeheader()
        writer.writerow({column: shown(cell) for column, cell in columns.items()})


def compare(cases: Sequence[Case], answers: dict[str, Answers]) -> None:
    """Raises DejavuError when swapping changed a token.

    Numbers of 16 bits are rounded in another way in batches of another size, so only equal ones are compared.
    """
    (resident,) = (case for case in cases if case.name == RESIDENT)
    for case in cases:
        model = case.prepared.plan.model
        if case.rows == resident.rows or model.dtype == "float32" or model.modelled is not None:
            check_same(case, answers[RESIDENT], answers[case.name], case.prepared.requests)


def _caption(config: Config, model: ModelSpec, clock: Clock) -> Caption:
    strategy, workload, repeats = config.strategy, config.workload, config.swap.repeats
    rounds = "one round" if repeats == 1 else f"median of {repeats} rounds"
    threads = config.cluster.threads_per_worker
    measured_on = datetime.fromtimestamp(clock.now()).date().isoformat()
    tokens = f"{workload.prompt_tokens} + {workload.max_tokens} tokens"
    if config.swap.lengths is not None:
        tokens = f"prompts of {workload.prompt_tokens} tokens"
    bus = "" if config.swap.bus_gbps is None else f", emulated bus of {config.swap.bus_gbps:g} Gbit/s"
    return Caption(
        title="Microbatch swapping in the same device memory",
        subtitle=f"{strategy.stages} stages, {strategy.num_in_flight} microbatches in flight, {tokens}, "
        f"{model.dtype}{bus}; {rounds}",
        source=f"{_computed(model)}{machine()}; {threads} thread{'s' if threads > 1 else ''} a worker; {measured_on}",
    )


def _computed(model: ModelSpec) -> str:
    """For a figure: whose times a rehearsal took; nothing of a run that computed."""
    times = model.modelled
    return (
        ""
        if times is None
        else f"rehearsed: times of {times.source.partition('. ')[0][:60]}, KV × {times.kv_scale:.3g}; "
    )
