"""``workflow=generate``: bring the cluster up, answer the workload's prompts, report, shut down."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from dejavu.clock import SystemClock
from dejavu.config import Config
from dejavu.control.faults import FaultSchedule
from dejavu.control.journal import RepairJournal
from dejavu.control.plan import Plan
from dejavu.control.receipts import receipts, with_repairs
from dejavu.control.summary import summary
from dejavu.engine import messages as m
from dejavu.engine.payloads import decode_spans
from dejavu.ids import RequestId
from dejavu.report.completions import CompletionWriter
from dejavu.report.counters import WorkerCounters
from dejavu.report.json_file import write_json
from dejavu.report.lateness import log_rehearsal
from dejavu.report.metrics import Metrics, summarize, write_metrics
from dejavu.report.progress import Progress, RichProgress
from dejavu.report.repairs import RepairReceipt
from dejavu.report.spans import Span
from dejavu.report.tables import StageRow, render_report
from dejavu.report.timeline import write_timeline
from dejavu.request import Completion, Request
from dejavu.serving.cluster_links import ClusterInterrupted, NoAnswer
from dejavu.serving.controller import Controller
from dejavu.serving.overseer import Watcher
from dejavu.workflows.auto import decided, with_prediction
from dejavu.workflows.cluster import running_cluster
from dejavu.workflows.injection import Injector, faults_of
from dejavu.workflows.preparation import Prepared, prepare
from dejavu.workflows.running import RunningCluster

logger = logging.getLogger(__name__)

_REPORT_TIMEOUT_S = 30.0
_SHOW_INTERVAL_S = 0.25


class Recorder:
    """The controller's observer: lines on disk as they come, and what the report needs."""

    def __init__(self, writer: CompletionWriter, progress: Progress, num_requests: int) -> None:
        self._writer = writer
        self._progress = progress
        self._num_requests = num_requests
        self._num_tokens = 0
        self._num_failed = 0
        self._shown_s = 0.0
        self.completions: list[Completion] = []
        self.token_times: dict[RequestId, Sequence[float]] = {}

    def token(self, request_id: RequestId, at_s: float) -> None:
        """One more token has come."""
        self._num_tokens += 1
        # Not at every token: showing costs more than counting, and the cores are the workers'.
        if at_s - self._shown_s > _SHOW_INTERVAL_S:
            self._shown_s = at_s
            self._show()

    def ended(self, completion: Completion, token_times_s: Sequence[float]) -> None:
        """The request's line is on disk."""
        self._writer.write(completion)
        self.completions.append(completion)
        self._num_failed += completion.finish_reason == "error"
        self.token_times[completion.id] = token_times_s
        self._show()

    def metrics(
        self, counters: Mapping[str, WorkerCounters], wall_s: float, repairs: Sequence[RepairReceipt] = ()
    ) -> Metrics:
        """What has been done so far, in figures."""
        return summarize(
            self.completions, self.token_times, counters, wall_s, repairs, num_submitted=self._num_requests
        )

    def in_order(self, requests: Sequence[Request]) -> list[Completion]:
        """The completions in the order of the requests, not of their ends."""
        places = {request.id: place for place, request in enumerate(requests)}
        return sorted(self.completions, key=lambda completion: places[completion.id])

    def _show(self) -> None:
        self._progress.requests(len(self.completions), self._num_requests, self._num_tokens, self._num_failed)


def run(config: Config, output: Path) -> None:
    """The workload's answers are in ``output`` and on the terminal. Raises DejavuError when the cluster failed."""
    console, clock = Console(), SystemClock()
    with RichProgress(Console(stderr=True), clock) as progress:
        config, answer = decided(config, output, progress)
        prepared = prepare(config, progress)
        write_json(output / "plan.json", with_prediction(summary(prepared.plan), answer))
        with CompletionWriter(output / "completions.jsonl") as writer:
            recorder = Recorder(writer, progress, len(prepared.requests))
            start_s = clock.now()
            counters: dict[str, WorkerCounters] = {}
            spans: dict[str, list[Span]] = {}
            journals: tuple[RepairJournal, ...] = ()
            wall_s: float | None = None
            try:
                with running_cluster(config, prepared.plan, output, progress) as cluster:
                    start_s = clock.now()
                    try:
                        with Injector(FaultSchedule(faults_of(config.fault)), cluster.launcher, clock) as injector:
                            wall_s = serve(cluster, prepared, recorder, injector)
                            _warn_of_waiting(injector)
                        counters, spans = collect(cluster)
                    finally:
                        journals = cluster.journals()
            finally:
                # Also of a run that failed or was interrupted: what it did until then.
                run_s = clock.now() - start_s if wall_s is None else wall_s
                metrics = recorder.metrics(counters, run_s, receipts(journals))
                write_metrics(output / "metrics.json", metrics)
                log_rehearsal(metrics)
                write_timeline(output / "timeline.json", with_repairs(spans, journals), start_s=start_s)
    _render(console, counters, recorder.in_order(prepared.requests), metrics)
    console.print(f"output: {output}", highlight=False, soft_wrap=True)


def serve(cluster: RunningCluster, prepared: Prepared, recorder: Recorder, injector: Watcher | None = None) -> float:
    """Every request has ended. Returns the seconds it took. Raises DejavuError with the operator's reason, if any."""
    controller = Controller(cluster.links, prepared.codec, recorder, cluster, injector)
    return controller.serve(prepared.requests)


def collect(cluster: RunningCluster) -> tuple[dict[str, WorkerCounters], dict[str, list[Span]]]:
    """What every worker has counted and done, by name in the order of the plan in force.

    Nothing, with a warning, when a worker fails just now: the requests have their answers.
    """
    plan = cluster.links.plan
    try:
        return _collect(cluster, plan)
    except (NoAnswer, ClusterInterrupted) as error:
        logger.warning("the workers' own counts are missing from the report: %s", error)
        return {}, {}


def _warn_of_waiting(injector: Injector) -> None:
    if injector.num_waiting:
        logger.warning("%d faults had not come when the last request ended", injector.num_waiting)


def _collect(cluster: RunningCluster, plan: Plan) -> tuple[dict[str, WorkerCounters], dict[str, list[Span]]]:
    answers = cluster.links.ask(m.AskReport(epoch=plan.epoch), plan.workers, m.Report, timeout_s=_REPORT_TIMEOUT_S)
    counters: dict[str, WorkerCounters] = {}
    spans: dict[str, list[Span]] = {}
    for name in plan.workers:
        answer = answers[name]
        assert isinstance(answer.message, m.Report)
        counters[name] = answer.message.counters
        spans[name] = decode_spans(answer.inbound.payload)
        answer.inbound.release()
    return counters, spans


def _render(
    console: Console, counters: Mapping[str, WorkerCounters], completions: Sequence[Completion], metrics: Metrics
) -> None:
    render_report(console, [StageRow.of(counter) for counter in counters.values()], completions, metrics)
