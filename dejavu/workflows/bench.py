"""``workflow=bench``: drives a running OpenAI-compatible endpoint open loop, and reports what serving people report."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import msgspec
from rich.console import Console

from dejavu.clock import Clock, SystemClock
from dejavu.config import Config
from dejavu.errors import ConfigError
from dejavu.report.amounts import show_rate
from dejavu.report.figure_style import Caption
from dejavu.report.json_file import replace_file, write_json
from dejavu.report.load import Limits, LoadReport, Sample, load_report
from dejavu.report.load_figure import draw_load
from dejavu.report.load_table import render_load
from dejavu.report.progress import Progress, RichProgress
from dejavu.workflows.bench_client import Endpoint, Load, LoadClient, model_of
from dejavu.workload import load_asks

_SHOW_INTERVAL_S = 0.25
_FAILED = 1


def run(config: Config, output: Path) -> int | None:
    """The load was sent; the report is in ``output`` and on the terminal. 1 when no request finished.

    Raises ConfigError and DejavuError where no load can be sent.
    """
    bench = config.bench
    endpoint = Endpoint.of(bench.url, bench.api_key, bench.ca_cert)
    limits = Limits(ttft_s=bench.ttft_s, tpot_s=bench.tpot_s, end_to_end_s=bench.e2e_s)
    asks = load_asks(config.workload, vocab_size=bench.vocab_size, duration_s=bench.duration_s)
    if not asks:
        raise ConfigError(f"workload={config.workload.kind.value}: no request is due")
    clock = SystemClock()
    began = datetime.fromtimestamp(clock.now()).astimezone().isoformat(timespec="seconds")
    with RichProgress(Console(stderr=True), clock) as progress:
        model = asyncio.run(model_of(endpoint, bench.model))
        load = Load(
            endpoint=endpoint,
            model=model,
            asks=asks,
            timeout_s=bench.timeout_s,
            max_concurrency=bench.max_concurrency,
        )
        client = LoadClient(load, clock, Shown(progress, clock, len(asks)))
        try:
            asyncio.run(client.run())
        finally:
            # Also of a load that was interrupted: what had ended by then.
            report = load_report(client.samples, limits, endpoint=endpoint.url, model=model, began=began)
            _write(output, report, client.samples, limits)
    console = Console()
    render_load(console, report)
    console.print(f"output: {output}", highlight=False, soft_wrap=True)
    return None if report["requests"]["finished"] else _FAILED


class Shown:
    """Shows a load's progress a few times a second: the cores may be the endpoint's too."""

    def __init__(self, progress: Progress, clock: Clock, num_requests: int) -> None:
        self._progress = progress
        self._clock = clock
        self._num_requests = num_requests
        self._shown_s = 0.0

    def __call__(self, client: LoadClient) -> None:
        """Something has come."""
        now_s, num_ended = self._clock.monotonic(), len(client.samples)
        if now_s - self._shown_s < _SHOW_INTERVAL_S and num_ended < self._num_requests:
            return
        self._shown_s = now_s
        self._progress.requests(num_ended, self._num_requests, client.num_pieces, client.num_failed)


def _write(output: Path, report: LoadReport, samples: Sequence[Sample], limits: Limits) -> None:
    """``bench.json``, a line for each request in ``requests.jsonl``, and ``figure.png`` are in ``output``."""
    write_json(output / "bench.json", report)
    ordered = sorted(samples, key=lambda sample: sample.due_s)
    replace_file(output / "requests.jsonl", msgspec.json.Encoder().encode_lines(ordered))
    draw_load(output / "figure.png", samples, limits, _caption(report))


def _caption(report: LoadReport) -> Caption:
    requests, throughput = report["requests"], report["throughput"]
    failed = f", {requests['failed']:,} failed" if requests["failed"] else ""
    return Caption(
        title=f"{report['model']}: how long answers took",
        subtitle=(
            f"{requests['finished']:,} of {requests['sent']:,} requests finished{failed}; "
            f"{show_rate(throughput['requests_per_s'], 'requests')}, "
            f"{show_rate(throughput['output_tokens_per_s'], 'output tokens')}; share that took at most so long"
        ),
        source=f"{report['endpoint']}; {report['began']}",
    )
