"""``workflow=streaming``: what streaming KV adds to the latency of a batch, in a table and a figure (Fig. 11, Fig. 27).

A cluster for each model and destination; on it rounds, in each of which every level serves every batch once.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console

from dejavu.clock import Clock, SystemClock
from dejavu.config import Config, Figure
from dejavu.control.summary import summary
from dejavu.report.figure_style import Caption
from dejavu.report.figures import draw_batches, draw_levels
from dejavu.report.json_file import write_json
from dejavu.report.machine import machine
from dejavu.report.progress import Progress, RichProgress
from dejavu.report.spans import Span
from dejavu.report.streaming_table import (
    FULL,
    OFF,
    BatchRow,
    RoundsFile,
    Summary,
    as_text,
    by_batch,
    by_level,
    summarise,
    write_table,
)
from dejavu.report.timeline import write_timeline
from dejavu.workflows.cluster import running_cluster
from dejavu.workflows.fresh_folder import check_fresh
from dejavu.workflows.streaming_batch import Answers, Bench, Served, check_same
from dejavu.workflows.streaming_case import BatchBar, Case, LabelledProgress, prepare_cases

logger = logging.getLogger(__name__)


def run(config: Config, output: Path) -> None:
    """``table.csv``, ``rounds.csv``, ``figure.png`` and a timeline for each cluster are in ``output``.

    An interrupted or failed run leaves the batches of ``rounds.csv`` that were measured.
    Raises DejavuError when a cluster failed or streaming changed an answer.
    """
    check_fresh(output / "clusters")
    console, clock = Console(), SystemClock()
    with RichProgress(Console(stderr=True), clock) as progress:
        cases = prepare_cases(config, progress)
        bar = BatchBar(progress, sum(case.num_batches for case in cases))
        rows: list[BatchRow] = []
        with RoundsFile(output / "rounds.csv") as rounds:

            def keep(row: BatchRow) -> None:
                rounds.write(row)
                rows.append(row)

            for case in cases:
                measure(case, output, progress, bar, clock, keep)
    summaries = summarise(rows)
    write_results(config, summaries, _caption(config, cases, clock), output, console)
    console.print(f"output: {output}", highlight=False, soft_wrap=True)


def measure(
    case: Case, output: Path, progress: Progress, bar: BatchBar, clock: Clock, keep: Callable[[BatchRow], None]
) -> None:
    """Each batch of one cluster was given to ``keep`` as soon as it was over; the last round's timeline is there."""
    folder = output / "clusters" / case.label
    folder.mkdir(parents=True)
    write_json(folder / "plan.json", summary(case.plan))
    try:
        with running_cluster(case.config, case.plan, folder, LabelledProgress(progress, case.label)) as cluster:
            bench = Bench(cluster, case.plan, clock, bar.part)
            _warm_up(case, bench, bar)
            _rounds(case, bench, output, bar, clock, keep)
    finally:
        # Gigabytes that nobody reads again.
        shutil.rmtree(folder / "kv", ignore_errors=True)


def _warm_up(case: Case, bench: Bench, bar: BatchBar) -> None:
    for batch in case.batches:
        # Connections, staging buffers and the KV pool's pages are there from the first measured batch on.
        bar.begin(f"{case.label}, batch {batch}, warming up")
        bench.serve(FULL, case.requests[:batch])
        bar.end()


def _rounds(
    case: Case, bench: Bench, output: Path, bar: BatchBar, clock: Clock, keep: Callable[[BatchRow], None]
) -> None:
    """Every round is over. Raises DejavuError when a level gave other tokens than off."""
    for round_index in range(case.repeats):
        start_s = clock.now()
        served: list[Served] = []
        for batch in case.batches:
            answers: dict[str, Answers] = {}
            for turn, level in enumerate(_rotated(case.levels, round_index)):
                bar.begin(f"{case.label}, batch {batch}, {level}, round {round_index + 1} of {case.repeats}")
                one = bench.serve(level, case.requests[:batch])
                bar.end()
                served.append(one)
                answers[level] = one.answers
                keep(_row(case, batch, round_index, turn, level, one))
            for level, got in answers.items():
                check_same(case.model, level, answers[OFF], got)
        logger.info("%s: round %s of %s is over", case.label, round_index + 1, case.repeats)
    spans: dict[str, list[Span]] = {
        name: [span for one in served for span in one.spans[name]] for name in case.plan.workers
    }
    write_timeline(output / f"timeline-{case.label}.json", spans, start_s=start_s)


def _rotated(levels: Sequence[str], round_index: int) -> list[str]:
    """Every level comes at every place in turn: what a batch leaves behind meets each of them."""
    first = round_index % len(levels)
    return [*levels[first:], *levels[:first]]


def _row(case: Case, batch: int, round_index: int, turn: int, level: str, one: Served) -> BatchRow:
    logger.info("%s, batch %s, level %s: %.3f s", case.label, batch, level, one.latency_s)
    return BatchRow(
        model=case.model,
        destination=case.destination,
        batch=batch,
        round_index=round_index,
        turn=turn,
        level=level,
        latency_s=one.latency_s,
        times=one.times,
    )


def write_results(
    config: Config, summaries: Sequence[Summary], caption: Caption, output: Path, console: Console
) -> None:
    """Table and figure are in ``output``, the table on the console, too."""
    if config.measurement.figure is Figure.fig11:
        rows, draw = by_level(summaries), draw_levels
    else:
        rows, draw = by_batch(summaries), draw_batches
    write_table(output / "table.csv", rows)
    draw(output / "figure.png", summaries, caption)
    console.print(as_text(rows))


def _caption(config: Config, cases: Sequence[Case], clock: Clock) -> Caption:
    measurement, workload = config.measurement, config.workload
    sizes = f"batch {measurement.batches[0]}, " if measurement.figure is Figure.fig11 else ""
    repeats = measurement.repeats
    rounds = "one round" if repeats == 1 else f"median of {repeats} rounds, line: lowest to highest"
    dtypes = "/".join(dict.fromkeys(case.plan.model.dtype for case in cases))
    measured_on = datetime.fromtimestamp(clock.now()).date().isoformat()
    threads = config.cluster.threads_per_worker
    return Caption(
        title="Slowdown of one batch by streaming its KV cache",
        subtitle=f"{sizes}{workload.prompt_tokens} + {workload.max_tokens} tokens, {dtypes}; {rounds}",
        source=f"{machine()}; {threads} thread{'s' if threads > 1 else ''} a worker; {measured_on}",
    )
