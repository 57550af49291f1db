"""``/metrics``: a service in Prometheus' format. Made at each look out of counts that are kept anyway."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dejavu.serving.latencies import Histogram
from dejavu.serving.meters import WorkerTotals
from dejavu.serving.view import ClusterState, ClusterView, StageState

OUTCOMES = ("finished", "aborted", "rejected", "failed")
_TOTALS = {
    "compute_seconds": ("dejavu_compute_seconds", "Seconds that workers computed."),
    "steps": ("dejavu_steps", "Token steps that workers computed."),
    "prompts": ("dejavu_prompt_passes", "Prompt passes that workers computed."),
    "streamed_bytes": ("dejavu_kv_streamed_bytes", "KV that workers streamed."),
    "replicated_bytes": ("dejavu_kv_replicated_bytes", "KV that workers copied to other workers."),
    "corrupt_chunks": ("dejavu_kv_corrupt_chunks", "Chunks of KV that were not what their headers say."),
}
_STAGE_LABELS = ("worker", "pipeline", "stage")


def metrics_route(view: ClusterView) -> Route:
    """``GET /metrics``."""
    registry = CollectorRegistry()
    registry.register(ServiceCollector(view))

    def metrics(_: Request) -> Response:
        # The media type names the charset already; Starlette would add another.
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return Route("/metrics", metrics)


class ServiceCollector(Collector):
    """What a registry asks for the families."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        """Every family, from one look."""
        state = self._view.state()
        yield from _requests(state)
        yield from _latencies(self._view, state.model)
        yield from _cluster(state)
        yield from _stages(state)
        yield from _workers(self._view.meters.totals())


def _requests(state: ClusterState) -> Iterator[Metric]:
    label, model, counts = ("model_name",), state.model, state.requests
    submitted = CounterMetricFamily("dejavu_requests_submitted", "Requests that came.", labels=label)
    submitted.add_metric([model], sum(counts[name] for name in (*OUTCOMES, "queued", "running")))
    yield submitted
    ended = CounterMetricFamily("dejavu_requests", "Requests by what became of them.", labels=("model_name", "outcome"))
    for outcome in OUTCOMES:
        ended.add_metric([model, outcome], counts[outcome])
    yield ended
    for name, key, text in (
        ("dejavu_prompt_tokens", "prompt_tokens", "Tokens of prompts that were computed."),
        ("dejavu_generation_tokens", "generated_tokens", "Tokens that were generated."),
        ("dejavu_requests_resumed", "resumed", "Ended requests that had survived a repair."),
    ):
        counter = CounterMetricFamily(name, text, labels=label)
        counter.add_metric([model], counts[key])
        yield counter
    for name, key, text in (
        ("dejavu_num_requests_running", "running", "Requests that have a row."),
        ("dejavu_num_requests_waiting", "queued", "Requests that wait for their first row."),
    ):
        gauge = GaugeMetricFamily(name, text, labels=label)
        gauge.add_metric([model], counts[key])
        yield gauge


def _latencies(view: ClusterView, model: str) -> Iterator[Metric]:
    taken = view.latencies.snapshot()
    for name, histogram, text in (
        ("dejavu_time_to_first_token_seconds", taken.time_to_first_token, "From arrival to the first token."),
        ("dejavu_time_per_output_token_seconds", taken.time_per_output_token, "From each token to the next."),
        ("dejavu_e2e_request_latency_seconds", taken.end_to_end, "From arrival to the end, of finished requests."),
    ):
        family = HistogramMetricFamily(name, text, labels=("model_name",))
        family.add_metric([model], _cumulative(histogram), histogram.sum_s)
        yield family


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*(f"{bound:g}" for bound in histogram.bounds_s), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))


def _cluster(state: ClusterState) -> Iterator[Metric]:
    yield CounterMetricFamily("dejavu_repairs", "Repairs that were begun.", value=state.num_repairs)
    for name, text, value in (
        ("dejavu_epoch", "Epoch of the plan in force.", state.epoch),
        ("dejavu_ready", "1 while a request would run at once.", state.not_ready is None),
        ("dejavu_uptime_seconds", "Since the service began.", state.uptime_s),
        ("dejavu_rows", "Rows that may run at a time.", state.rows),
        ("dejavu_rows_taken", "Rows that run.", state.rows_taken),
    ):
        yield GaugeMetricFamily(name, text, value=float(value))


def _stages(state: ClusterState) -> Iterator[Metric]:
    """Of the places of the plan in force."""
    places = [
        ([stage.worker, pipeline.kind, str(stage.stage)], stage)
        for pipeline in state.pipelines
        for stage in pipeline.stages
    ]
    up = GaugeMetricFamily("dejavu_stage_up", "1 while the place's worker serves.", labels=_STAGE_LABELS)
    busy = GaugeMetricFamily("dejavu_stage_busy_ratio", "Computing, of the last second.", labels=_STAGE_LABELS)
    for labels, stage in places:
        up.add_metric(labels, float(stage.state == "serving"))
        if stage.busy_share is not None:
            busy.add_metric(labels, stage.busy_share)
    yield from (up, busy)
    yield _kv("dejavu_kv_cache_used_bytes", "KV of rows, by where it lies.", places, is_room=False)
    yield _kv("dejavu_kv_cache_room_bytes", "Memory that is reserved for KV of rows.", places, is_room=True)


def _kv(name: str, text: str, places: list[tuple[list[str], StageState]], *, is_room: bool) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(*_STAGE_LABELS, "place"))
    for labels, stage in places:
        for place, num_bytes in (stage.kv_room_bytes if is_room else stage.kv_used_bytes).items():
            family.add_metric([*labels, place], num_bytes)
    return family


def _workers(totals: Mapping[str, WorkerTotals]) -> Iterator[Metric]:
    """Of every worker that there was: what it counted stays when it dies."""
    for key, (name, text) in _TOTALS.items():
        counter = CounterMetricFamily(name, text, labels=("worker",))
        for worker, total in sorted(totals.items()):
            counter.add_metric([worker], total.amounts.get(key, 0))
        yield counter
    swapped = CounterMetricFamily(
        "dejavu_kv_swapped_bytes", "KV that went into device memory and out of it.", labels=("worker", "direction")
    )
    sent = CounterMetricFamily("dejavu_link_sent_bytes", "What workers sent to each other.", labels=("worker", "to"))
    for worker, total in sorted(totals.items()):
        for direction in ("in", "out"):
            swapped.add_metric([worker, direction], total.amounts.get(f"swapped_{direction}_bytes", 0))
        for peer, num_bytes in sorted(total.sent_bytes.items()):
            sent.add_metric([worker, peer], num_bytes)
    yield from (swapped, sent)
