"""The report of a run that a person reads at its end: answers, stages, figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from dejavu.report.amounts import printable, show_bytes, show_count, show_rate, show_seconds, show_share
from dejavu.report.counters import WorkerCounters
from dejavu.report.lateness import is_too_late, rehearsal_line
from dejavu.report.metrics import FINISHED_REASONS, Metrics
from dejavu.report.repairs import repair_line
from dejavu.request import Completion

PIPELINE_ORDER = ("prompt", "token", "colocated", "memory")
MOST_REPAIRS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One worker of the plan in force; what was not measured is None."""

    pipeline: str
    stage: int
    worker: str
    layers: tuple[int, int]
    """Global layer numbers [start, stop)."""
    busy_share: float | None = None
    peak_rss_bytes: int | None = None
    weight_bytes: int | None = None
    kv_pool_bytes: int | None = None

    @classmethod
    def of(cls, counters: WorkerCounters) -> StageRow:
        """The row of a worker that has reported."""
        return cls(
            pipeline=counters.pipeline,
            stage=counters.stage,
            worker=counters.name,
            layers=counters.layers,
            busy_share=counters.busy_share,
            peak_rss_bytes=counters.peak_rss_bytes or None,
            weight_bytes=counters.weight_bytes or None,
            kv_pool_bytes=counters.kv_pool_bytes or None,
        )


def render_report(
    console: Console,
    plan_rows: Sequence[StageRow],
    completions: Sequence[Completion] | None,
    metrics: Metrics,
    *,
    max_answers: int = 20,
) -> None:
    """The report is on ``console``; beyond ``max_answers`` answers and as many errors it says how many are left out.

    ``completions`` None: it is about the figures alone.
    """
    console.print(Group(*_sections(plan_rows, completions, metrics, max_answers)))


def _sections(
    plan_rows: Sequence[StageRow], completions: Sequence[Completion] | None, metrics: Metrics, max_answers: int
) -> Iterable[RenderableType]:
    if completions is not None:
        yield Rule(Text("Answers", style="bold"), align="left", style="dim")
        yield from _answers(completions, max_answers)
    yield Rule(Text(_mode(plan_rows), style="bold"), align="left", style="dim")
    if plan_rows:
        yield _stage_table(plan_rows)
    yield _figures(metrics)


def _answers(completions: Sequence[Completion], max_answers: int) -> Iterable[RenderableType]:
    """A block for each of the first finished requests and, apart from them, of the first failed ones."""
    finished = [one for one in completions if one.finish_reason in FINISHED_REASONS]
    failed = [one for one in completions if one.finish_reason not in FINISHED_REASONS]
    for completion in finished[:max_answers] + failed[:max_answers]:
        yield _answer(completion)
    for hidden, noun in ((finished[max_answers:], "answer"), (failed[max_answers:], "error")):
        if hidden:
            yield Text(f"… and {show_count(len(hidden), 'more ' + noun)} in completions.jsonl\n", style="dim")
    if not completions:
        yield Text("No request was answered.\n", style="dim")


def _answer(completion: Completion) -> RenderableType:
    """Id, prompt and how it ended on one line, then the text in full, or the reason for an error in red."""
    is_error = completion.finish_reason not in FINISHED_REASONS
    head = Table.grid(padding=(0, 1), expand=True)
    head.add_column(overflow="fold")
    head.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    head.add_column(no_wrap=True, justify="right")
    ending = f"{show_count(len(completion.tokens), 'token')}, {completion.finish_reason}"
    if completion.resumed:
        ending += f", resumed {completion.resumed}×"
    head.add_row(
        Text(printable(completion.id), style="bold red" if is_error else "bold cyan"),
        Text(_prompt_line(completion), style="italic"),
        Text(ending, style="red" if is_error else "dim"),
    )
    blocks: list[RenderableType] = [head]
    if completion.text.strip():
        blocks.append(Padding(Text(printable(completion.text.strip())), (0, 0, 0, 2)))
    elif not is_error:
        blocks.append(Padding(Text("(no text)", style="dim"), (0, 0, 0, 2)))
    if is_error:
        reason = Text(printable(completion.error or "no reason was given"), style="red")
        blocks.append(Padding(reason, (0, 0, 0, 2)))
    return Padding(Group(*blocks), (0, 0, 1, 0))


def _prompt_line(completion: Completion) -> str:
    if completion.prompt is None:
        return f"(prompt of {show_count(completion.prompt_tokens, 'token')})"
    return " ".join(printable(completion.prompt).split()) or "(empty prompt)"


def _mode(plan_rows: Sequence[StageRow]) -> str:
    """``Disaggregated: prompts on 1 stage, tokens on 2 stages``, as the rows say."""
    depths = {name: sum(row.pipeline == name for row in plan_rows) for name in PIPELINE_ORDER}
    if depths["prompt"] and depths["token"]:
        prompt, token = show_count(depths["prompt"], "stage"), show_count(depths["token"], "stage")
        return f"Disaggregated: prompts on {prompt}, tokens on {token}"
    if depths["colocated"]:
        return f"Colocated: prompts and tokens on {show_count(depths['colocated'], 'stage')}"
    return "Run"


def _stage_table(plan_rows: Sequence[StageRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column("pipeline", no_wrap=True)
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("worker", style="cyan", overflow="fold")
    table.add_column("layers", justify="right", no_wrap=True)
    for heading in ("busy", "weights", "KV pool", "peak memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    order = {name: position for position, name in enumerate(PIPELINE_ORDER)}
    for row in sorted(plan_rows, key=lambda row: (order.get(row.pipeline, len(order)), row.stage, row.worker)):
        start, stop = row.layers
        table.add_row(
            row.pipeline,
            str(row.stage),
            row.worker,
            f"{start}–{stop - 1}" if stop - start > 1 else str(start),
            show_share(row.busy_share),
            show_bytes(row.weight_bytes),
            show_bytes(row.kv_pool_bytes),
            show_bytes(row.peak_rss_bytes),
        )
    return table


def _figures(metrics: Metrics) -> RenderableType:
    """The run in a few labelled lines; what did not happen is left out, what went wrong is coloured."""
    figures = Table.grid(padding=(0, 2))
    figures.add_column(no_wrap=True, style="dim")
    figures.add_column(overflow="fold")
    figures.add_row("requests", _served(metrics))
    tokens = metrics["tokens"]
    figures.add_row("tokens", f"{tokens['generated']:,} generated, {tokens['prompt']:,} of prompts")
    rates = metrics["throughput"]
    if rates["tokens_per_s"] is not None:
        speed = Text(show_rate(rates["tokens_per_s"], "tokens"), style="bold green")
        over = f" ({show_rate(rates['requests_per_s'], 'requests')}) over {show_seconds(metrics['wall_s'])}"
        figures.add_row("throughput", speed.append(over, "not bold default"))
    for label, spread, suffix in (
        ("first token", metrics["latency"]["time_to_first_token_s"], ""),
        ("next tokens", metrics["latency"]["time_per_output_token_s"], " each"),
        ("latency", metrics["latency"]["normalized_s_per_token"], " per token, end to end"),
    ):
        if spread["median"] is not None:
            p95 = show_seconds(spread["p95"])
            figures.add_row(label, f"{show_seconds(spread['median'])}{suffix} (95th percentile {p95})")
    for label, line in _transfers(metrics):
        figures.add_row(label, line)
    rehearsal = metrics["rehearsal"]
    if rehearsal is not None:
        style = "bold red" if is_too_late(rehearsal) else "yellow"
        figures.add_row("rehearsed", Text(rehearsal_line(rehearsal), style=style))
    return Padding(figures, (1, 0, 0, 0))


def _served(metrics: Metrics) -> Text:
    requests = metrics["requests"]
    served = Text(f"{requests['finished']:,} of {requests['submitted']:,} finished")
    if requests["failed"]:
        served.append(f", {requests['failed']:,} failed", style="bold red")
    if requests["resumed"]:
        served.append(f", {requests['resumed']:,} resumed after a repair", style="yellow")
    return served


def _transfers(metrics: Metrics) -> Iterable[tuple[str, Text]]:
    """What moved, which chunks were refused, and the repairs, each only where there was any."""
    for kind, transfer in metrics["transfers"].items():
        if transfer["bytes"]:
            share = "" if transfer["hidden_share"] is None else f", {show_share(transfer['hidden_share'])} of its time"
            yield f"KV {kind}", Text(show_bytes(transfer["bytes"]) + (share and share + " hidden under computation"))
    for name, style in (("duplicate", "yellow"), ("stale", "yellow"), ("corrupt", "bold red")):
        if metrics["kv"].get(name):
            yield "KV chunks", Text(f"{show_count(metrics['kv'][name], name + ' chunk')} dropped", style=style)
    repairs = metrics["repairs"]
    for repair in repairs[:MOST_REPAIRS]:
        style = "bold red" if repair["problem"] else "yellow"
        yield f"repair {repair['number']}", Text(printable(repair_line(repair)), style=style)
    if repairs[MOST_REPAIRS:]:
        more = show_count(len(repairs) - MOST_REPAIRS, "more repair")
        yield "repairs", Text(f"… and {more} in metrics.json", style="dim")
