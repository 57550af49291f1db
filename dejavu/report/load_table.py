"""A load on an endpoint as a person reads it: a table of latencies, and a line for each other figure."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dejavu.report.amounts import UNKNOWN, printable, show_count, show_rate, show_seconds, show_share
from dejavu.report.load import Distribution, Goodput, LoadReport

_LATENCIES = (
    ("time to first token", "time_to_first_token_s"),
    ("time per output token", "time_per_output_token_s"),
    ("between tokens", "inter_token_s"),
    ("end to end", "end_to_end_s"),
)


def render_load(console: Console, report: LoadReport) -> None:
    """The report is on ``console``."""
    figures = Table.grid(padding=(0, 2))
    figures.add_column(no_wrap=True, style="dim")
    figures.add_column(overflow="fold")
    for label, value in _lines(report):
        figures.add_row(label, value)
    console.print(_latency_table(report))
    console.print(figures)


def _latency_table(report: LoadReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column("latency", no_wrap=True)
    for heading in ("mean", "p50", "p95", "p99", "max"):
        table.add_column(heading, justify="right", no_wrap=True)
    latency = report["latency"]
    for label, key in _LATENCIES:
        table.add_row(label, *_cells(latency[key]))  # type: ignore[literal-required]
    table.add_row("client sent late by", *_cells(report["client"]["lateness_s"]), style="dim")
    return table


def _cells(spread: Distribution) -> Iterator[str]:
    for value in (spread["mean"], spread["p50"], spread["p95"], spread["p99"], spread["max"]):
        yield show_seconds(value)


def _lines(report: LoadReport) -> Iterator[tuple[str, Text]]:
    requests, tokens, throughput = report["requests"], report["tokens"], report["throughput"]
    yield "endpoint", Text(f"{printable(report['endpoint'])}, model {printable(report['model'])}")
    finished = f"{requests['finished']:,} of {requests['sent']:,} finished in {show_seconds(report['duration_s'])}"
    yield "requests", Text(f"{finished}, at most {report['client']['most_under_way']:,} at a time")
    for kind, number in requests["errors"].items():
        detail = requests["details"].get(kind)
        said = f": {printable(detail)}" if detail else ""
        yield "errors", Text(f"{number:,} × {printable(kind)}{said}", style="bold red")
    yield "tokens", Text(f"{show_count(tokens['output'], 'token')} generated, {tokens['prompt']:,} of prompts")
    speed = Text(show_rate(throughput["output_tokens_per_s"], "output tokens"), style="bold green")
    others = (
        f", {show_rate(throughput['total_tokens_per_s'], 'total tokens')}, "
        f"{show_rate(throughput['requests_per_s'], 'requests')}"
    )
    yield "throughput", speed.append(others, "not bold default")
    if report["goodput"] is not None:
        yield "goodput", Text(_goodput_line(report["goodput"]))


def _goodput_line(goodput: Goodput) -> str:
    limits = [
        f"{name} ≤ {show_seconds(limit)}"
        for name, limit in (("TTFT", goodput["ttft_s"]), ("TPOT", goodput["tpot_s"]), ("E2E", goodput["e2e_s"]))
        if limit is not None
    ]
    rate = show_rate(goodput["requests_per_s"], "requests") if goodput["requests"] else UNKNOWN
    return f"{rate}, {show_share(goodput['share'])} of the requests within {', '.join(limits)}"
