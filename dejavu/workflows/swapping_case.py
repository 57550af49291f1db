"""The cases of a measurement of swapping: a declaration and a plan for each; one run of one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from dejavu.clock import Clock
from dejavu.config import Config
from dejavu.config.strategy import Swapping
from dejavu.control.memory import stage_memory
from dejavu.control.placement import place
from dejavu.control.plan import Place, Plan
from dejavu.control.summary import summary
from dejavu.errors import DejavuError
from dejavu.ids import FIRST_EPOCH, RequestId
from dejavu.models.spec import ModelSpec
from dejavu.report.completions import CompletionWriter
from dejavu.report.counters import WorkerCounters
from dejavu.report.json_file import write_json
from dejavu.report.lateness import log_rehearsal
from dejavu.report.metrics import summarize, write_metrics
from dejavu.report.progress import Progress
from dejavu.report.spans import Span
from dejavu.report.swap_runs import DOUBLE, EQUAL, RESIDENT, SwapRun
from dejavu.report.timeline import write_timeline
from dejavu.request import Request
from dejavu.workflows.cluster import running_cluster
from dejavu.workflows.generate import Recorder, collect, serve
from dejavu.workflows.preparation import Prepared, cluster_model, declared, worker_devices
from dejavu.workflows.streaming_case import LabelledProgress
from dejavu.workload import load

_GB = 10**9
_BYTES_PER_GIGABIT = 10**9 / 8

Answers = Mapping[RequestId, tuple[int, ...]]
"""Tokens by request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to serve the requests of one model and batch."""

    model: str
    batch: int
    length: int
    """Tokens of a request, prompt and answer together."""
    name: str
    config: Config
    prepared: Prepared

    @property
    def label(self) -> str:
        """Its name in files and on the progress line."""
        return f"{self.model}-{self.batch}x{self.length}-{self.name.replace(' ', '-')}"

    @property
    def rows(self) -> int:
        """Of its microbatches."""
        return self.prepared.plan.token_pipeline.microbatch_rows


def prepare_cases(config: Config, progress: Progress) -> list[list[Case]]:
    """The cases of each model and batch; every model lies in its folder, every plan is made, nothing runs.

    Raises ConfigError or InfeasibleError.
    """
    found = []
    for kind in config.swap.models:
        for length in lengths_of(config):
            # Just enough positions: a longer buffer would cost memory and show nothing.
            of_model = replace(config, model=replace(config.model, kind=kind, max_length=length))
            spec = cluster_model(_with_rows(of_model, 2 * max(config.swap.batches), Swapping.off), progress)
            found += [_cases(kind, batch, length, of_model, spec) for batch in config.swap.batches]
    return found


def lengths_of(config: Config) -> list[int]:
    """Tokens of a request, prompt and answer together, of each measurement."""
    workload = config.workload
    return config.swap.lengths or [(workload.prompt_tokens or 0) + (workload.max_tokens or 0)]


def _cases(kind: str, batch: int, length: int, config: Config, spec: ModelSpec) -> list[Case]:
    """All in devices that hold what B rows need without swapping, and for the same requests: two rounds of them."""
    memory_bytes = device_bytes(_plan(config, batch, Swapping.off, spec))
    num_requests = 2 * batch * config.strategy.num_in_flight
    config = replace(
        config,
        cluster=replace(config.cluster, device_memory_gb=(memory_bytes + 1) / worker_devices(config) / _GB),
        workload=replace(
            config.workload, num_requests=num_requests, max_tokens=length - (config.workload.prompt_tokens or 0)
        ),
    )
    requests = load(config.workload, codec=None, vocab_size=spec.vocab_size, avoid=spec.eos_token_ids)
    ways = ((RESIDENT, batch, Swapping.off), (EQUAL, batch, Swapping.on), (DOUBLE, 2 * batch, Swapping.on))
    return [
        Case(
            model=kind,
            batch=batch,
            length=length,
            name=name,
            config=config,
            prepared=Prepared(plan=_plan(config, rows, swapping, spec), codec=None, requests=requests),
        )
        for name, rows, swapping in ways
        if name != EQUAL or config.swap.lengths is None
    ]


def _plan(config: Config, rows: int, swapping: Swapping, spec: ModelSpec) -> Plan:
    one = replace(declared(_with_rows(config, rows, swapping)), bus_bytes_per_s=_bus_bytes_per_s(config, spec))
    return place(one, spec, epoch=FIRST_EPOCH)


def _with_rows(config: Config, rows: int, swapping: Swapping) -> Config:
    microbatch = replace(config.strategy.microbatch, prompt=rows, token=rows, prompt_tokens=None)
    return replace(config, strategy=replace(config.strategy, microbatch=microbatch, swapping=swapping))


def _bus_bytes_per_s(config: Config, spec: ModelSpec) -> float | None:
    """The emulated bus; a rehearsal has fewer bytes in other times, and its bus is slower by as much."""
    if config.swap.bus_gbps is None:
        return None
    time_scale = 1.0 if spec.modelled is None else spec.modelled.time_scale
    return config.swap.bus_gbps * _BYTES_PER_GIGABIT * spec.kv_scale / time_scale


def device_bytes(plan: Plan) -> int:
    """What the stage that needs most needs."""
    pipeline = plan.token_pipeline
    return max(stage_memory(plan, Place(pipeline=pipeline, stage=stage)).total_bytes for stage in pipeline.stages)


def run_case(
    case: Case, folder: Path, progress: Progress, clock: Clock, *, round_index: int, turn: int
) -> tuple[SwapRun, Answers]:
    """The requests were served on a cluster of its own, whose files lie in ``folder``.

    Raises DejavuError when the cluster failed or a request was not answered.
    """
    folder.mkdir(parents=True)
    plan, requests = case.prepared.plan, case.prepared.requests
    write_json(folder / "plan.json", summary(plan))
    shown = LabelledProgress(progress, f"{case.label}, round {round_index + 1}")
    with CompletionWriter(folder / "completions.jsonl") as writer:
        recorder = Recorder(writer, shown, len(requests))
        with running_cluster(case.config, plan, folder, shown) as cluster:
            start_s = clock.now()
            wall_s = serve(cluster, case.prepared, recorder)
            counters, spans = collect(cluster)
    metrics = summarize(recorder.completions, recorder.token_times, counters, wall_s, num_submitted=len(requests))
    write_metrics(folder / "metrics.json", metrics)
    log_rehearsal(metrics)
    write_timeline(folder / "timeline.json", spans, start_s=start_s)
    for completion in recorder.completions:
        if completion.finish_reason != "length":
            reason = completion.error or completion.finish_reason
            raise DejavuError(f"{case.label}: request {completion.id} failed: {reason}")
    run = _run(case, counters, spans, wall_s, round_index=round_index, turn=turn)
    return run, {completion.id: completion.tokens for completion in recorder.completions}


def _run(
    case: Case,
    counters: Mapping[str, WorkerCounters],
    spans: Mapping[str, Sequence[Span]],
    wall_s: float,
    *,
    round_index: int,
    turn: int,
) -> SwapRun:
    swaps = [one.swap for one in counters.values()]
    return SwapRun(
        model=case.model,
        batch=case.batch,
        length=case.length,
        case=case.name,
        rows=case.rows,
        round_index=round_index,
        turn=turn,
        wall_s=wall_s,
        tokens_per_s=sum(request.max_tokens for request in case.prepared.requests) / wall_s,
        prompt_s=_slowest_s(spans, "prompt"),
        step_s=_slowest_s(spans, "step"),
        steps=sum(one.steps for one in counters.values()),
        bytes_in=sum(one.bytes_in for one in swaps),
        bytes_out=sum(one.bytes_out for one in swaps),
        unused_bytes=sum(one.unused_bytes for one in swaps),
        waits=sum(one.waits for one in swaps),
        wait_s=sum(one.wait_s for one in swaps),
        busy_s=sum(one.busy_s for one in swaps),
        own_s=sum(one.own_s for one in swaps),
    )


def _slowest_s(spans: Mapping[str, Sequence[Span]], name: str) -> float:
    """The median pass of that kind, at the stage where it takes longest."""
    by_stage = [[span.duration_s for span in own if span.name == name] for own in spans.values()]
    return max((median(own) for own in by_stage if own), default=0.0)


def check_same(case: Case, expected: Answers, got: Answers, requests: Sequence[Request]) -> None:
    """Swapping has changed no token. Raises DejavuError naming the case and the first request that differs."""
    for request in requests:
        if got[request.id] != expected[request.id]:
            raise DejavuError(f"{case.label}: the tokens of request {request.id} differ from those without swapping")
