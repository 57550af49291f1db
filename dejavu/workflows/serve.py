"""``workflow=serve``: bring the cluster up, answer the HTTP API until told to stop, drain, report, shut down."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from dejavu.api.app import create_app
from dejavu.api.page import operations_routes
from dejavu.api.served import ServedModel
from dejavu.api.server import Address, HttpServer, check_tls
from dejavu.clock import Clock, SystemClock
from dejavu.config import Config, ModelConfig
from dejavu.config.serve import ServeConfig
from dejavu.control.faults import FaultSchedule
from dejavu.control.journal import RepairJournal
from dejavu.control.receipts import receipts, with_repairs
from dejavu.control.summary import summary
from dejavu.models.tokenizer import TextCodec
from dejavu.report.completions import CompletionWriter
from dejavu.report.counters import WorkerCounters
from dejavu.report.json_file import write_json
from dejavu.report.lossy_stream import lossy
from dejavu.report.metrics import write_metrics
from dejavu.report.progress import Progress, RichProgress
from dejavu.report.spans import Span
from dejavu.report.tables import StageRow, render_report
from dejavu.report.timeline import write_timeline
from dejavu.serving.controller import Controller
from dejavu.serving.observers import Observers
from dejavu.serving.service import Service
from dejavu.serving.tally import Counts
from dejavu.workflows.auto import decided, with_prediction
from dejavu.workflows.cluster import running_cluster
from dejavu.workflows.generate import collect
from dejavu.workflows.impatience import impatient
from dejavu.workflows.injection import Injector, faults_of
from dejavu.workflows.preparation import prepare_service
from dejavu.workflows.running import RunningCluster
from dejavu.workflows.serve_record import ServeRecord
from dejavu.workflows.serve_thread import ServiceThread
from dejavu.workflows.serve_view import Instruments

logger = logging.getLogger(__name__)

_LINE_INTERVAL_S = 30.0
"""Between two lines of progress where there is no terminal: a service runs for days."""


@dataclass(slots=True)
class _Account:
    """What is known of a service when it ends, however it ends."""

    counts: Counts = field(default_factory=Counts)
    wall_s: float = 0.0
    counters: Mapping[str, WorkerCounters] = field(default_factory=dict)
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    journals: tuple[RepairJournal, ...] = ()
    failure: str | None = None
    """What ended the service while it was being stopped."""


def run(config: Config, output: Path) -> int | None:
    """The service was told to stop, and has. Returns None, or 1 when it failed meanwhile.

    Raises DejavuError when its cluster failed before, KeyboardInterrupt when it was told again.
    """
    console, clock, account = lossy(Console()), SystemClock(), _Account()
    with ExitStack() as stack:
        progress = stack.enter_context(RichProgress(Console(stderr=True), clock, line_interval_s=_LINE_INTERVAL_S))
        # Nothing is started before it is certain where the service will answer.
        address = stack.enter_context(Address(config.serve.host, config.serve.port))
        tls = _tls_of(config.serve)
        config, answer = decided(config, output, progress)
        prepared = prepare_service(config, progress)
        write_json(output / "plan.json", with_prediction(summary(prepared.plan), answer))
        writer = None
        if config.serve.completions:
            writer = stack.enter_context(CompletionWriter(output / "completions.jsonl"))
        record = ServeRecord(writer, progress)
        start_s = clock.now()
        try:
            with running_cluster(config, prepared.plan, output, progress) as cluster:
                start_s = clock.now()
                _serve(config, cluster, HttpDoor(address, tls, prepared.codec), record, progress, account)
        finally:
            # Also of a service that failed or was interrupted: what it did until then.
            metrics = record.metrics(account.counts, account.counters, account.wall_s, receipts(account.journals))
            write_metrics(output / "metrics.json", metrics)
            spans = with_repairs(account.spans, account.journals)
            write_timeline(output / "timeline.json", spans, start_s=start_s)
    render_report(console, [StageRow.of(counter) for counter in account.counters.values()], None, metrics)
    console.print(f"output: {output}", highlight=False, soft_wrap=True)
    return None if account.failure is None else 1


@dataclass(frozen=True, slots=True)
class HttpDoor:
    """Where the service answers, with which certificate and key, and in which language."""

    address: Address
    tls: tuple[Path, Path] | None
    codec: TextCodec | None


def _serve(
    config: Config,
    cluster: RunningCluster,
    door: HttpDoor,
    record: ServeRecord,
    progress: Progress,
    account: _Account,
) -> None:
    """The service has been drained, and ``account`` is complete; also when it failed, as far as it can be."""
    clock = SystemClock()
    with Injector(FaultSchedule(faults_of(config.fault)), cluster.launcher, clock) as injector:
        model = cluster.links.plan.model
        instruments = Instruments()
        observers = Observers(record, instruments.latencies)
        controller = Controller(cluster.links, door.codec, observers, cluster, injector, instruments.meters)
        service = Service(
            controller,
            clock,
            max_queue=config.serve.max_queue,
            request_timeout_s=config.serve.request_timeout_s,
        )
        served = ServedModel(
            id=config.serve.model_name or name_of(config.model),
            created_s=int(clock.now()),
            max_length=model.max_length,
            codec=door.codec,
        )
        view = instruments.view(cluster, service, name=config.cluster.name, model=served.id, clock=clock)
        app = create_app(service, served, api_key=config.serve.api_key, extra_routes=operations_routes(view))
        try:
            with ServiceThread(service) as thread, HttpServer(app, door.address, door.tls) as server:
                progress.note(f"serving {served.id}: {server.url}/v1")
                account.failure = _until_told(thread, config.serve.drain_timeout_s, progress, clock)
        finally:
            account.counts, account.wall_s = service.snapshot().counts, service.now_s()
            account.journals = cluster.journals()
    if account.failure is None:
        account.counters, account.spans = collect(cluster)


def _until_told(thread: ServiceThread, drain_timeout_s: float, progress: Progress, clock: Clock) -> str | None:
    """Somebody has interrupted this process, and everything open has ended. Returns what the service failed of then.

    Raises what ended the service before, and KeyboardInterrupt when somebody does not want to wait for the end.
    """
    try:
        thread.wait()
    except KeyboardInterrupt:
        num_open = thread.service.snapshot().counts.open
        progress.note(f"stopping: {num_open} open requests have {drain_timeout_s:g} s to end, new ones are refused")
        with impatient(clock):
            is_whole = thread.service.drain(drain_timeout_s)
        failure = thread.failure()
        if failure is not None:
            logger.info("the service failed while it was stopping", exc_info=failure)
            reason = str(failure) or type(failure).__name__
            progress.note(f"the service failed while it was stopping: {reason}")
            return reason
        if not is_whole:
            logger.warning("not every request ended within serve.drain_timeout_s=%g", drain_timeout_s)
    return None


def name_of(model: ModelConfig) -> str:
    """What clients call the model unless the declaration says otherwise."""
    if model.name is not None:
        return model.name
    return model.kind if model.path is None else Path(model.path).name


def _tls_of(serve: ServeConfig) -> tuple[Path, Path] | None:
    if serve.tls_cert is None or serve.tls_key is None:
        return None
    tls = Path(serve.tls_cert), Path(serve.tls_key)
    check_tls(*tls)
    return tls
