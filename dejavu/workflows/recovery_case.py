"""The cases of a comparison of recoveries: one workload, a declaration and a plan for each; a run of one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dejavu.clock import Clock
from dejavu.config import Config, FaultConfig, Recovery, RecoveryCase, RecoveryFigure
from dejavu.control.faults import FaultSchedule
from dejavu.control.journal import RepairJournal
from dejavu.control.placement import place
from dejavu.control.receipts import receipts, with_repairs
from dejavu.control.summary import summary
from dejavu.errors import DejavuError
from dejavu.ids import FIRST_EPOCH, RequestId
from dejavu.models.spec import ModelSpec
from dejavu.report.completions import CompletionWriter
from dejavu.report.json_file import write_json
from dejavu.report.lateness import log_rehearsal
from dejavu.report.metrics import summarize, write_metrics
from dejavu.report.progress import Progress
from dejavu.report.recovery_runs import CaseRun, end_curve, token_curve
from dejavu.report.timeline import write_timeline
from dejavu.request import Request
from dejavu.workflows.cluster import running_cluster
from dejavu.workflows.generate import Recorder, collect, serve
from dejavu.workflows.injection import Injector, faults_of
from dejavu.workflows.preparation import Prepared, cluster_model, declared
from dejavu.workflows.running import RunningCluster
from dejavu.workflows.streaming_case import LabelledProgress
from dejavu.workload import load

Answers = Mapping[RequestId, tuple[int, ...]]
"""Tokens by request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to run the workload."""

    name: str
    config: Config
    """The declaration of its clusters."""
    prepared: Prepared
    shown: tuple[RequestId, ...]
    """The rows of the microbatch whose tokens are shown; none where requests are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run and its answers."""

    run: CaseRun
    answers: Answers


def prepare_cases(config: Config, progress: Progress) -> list[Case]:
    """The model lies in its folder, every plan is made, nothing runs. Raises ConfigError or InfeasibleError."""
    model = cluster_model(config, progress)
    requests = load(config.workload, codec=None, vocab_size=model.vocab_size, avoid=model.eos_token_ids)
    return [_case(case, config, model, requests) for case in config.comparison.cases]


def _case(case: RecoveryCase, config: Config, model: ModelSpec, requests: Sequence[Request]) -> Case:
    own = case_config(config, case)
    plan = place(declared(own), model, epoch=FIRST_EPOCH)
    comparison, rows = config.comparison, plan.token_pipeline.microbatch_rows
    first = comparison.microbatch * rows
    is_counting = comparison.figure is RecoveryFigure.fig15
    return Case(
        name=case.value,
        config=own,
        prepared=Prepared(plan=plan, codec=None, requests=requests),
        shown=() if is_counting else tuple(request.id for request in requests[first : first + rows]),
    )


def case_config(config: Config, case: RecoveryCase) -> Config:
    """The declaration of one case: only the case with replicas pays for replicas, and ``none`` has no fault."""
    if case is RecoveryCase.replica:
        return replace(config, strategy=replace(config.strategy, recovery=Recovery.replica))
    if case is RecoveryCase.none:
        return replace(config, strategy=replace(config.strategy, replication=0), fault=FaultConfig())
    strategy = replace(config.strategy, replication=0, recovery=Recovery(case.value))
    return replace(config, strategy=strategy)


def run_case(case: Case, folder: Path, progress: Progress, clock: Clock, *, round_index: int, turn: int) -> Outcome:
    """The workload was served on a cluster of its own, whose files lie in ``folder``.

    Raises DejavuError when the cluster failed, a request was not answered, or a declared fault did not come to pass.
    """
    folder.mkdir(parents=True)
    plan = case.prepared.plan
    write_json(folder / "plan.json", summary(plan))
    shown = LabelledProgress(progress, f"{case.name}, round {round_index + 1}")
    with CompletionWriter(folder / "completions.jsonl") as writer:
        recorder = Recorder(writer, shown, len(case.prepared.requests))
        with running_cluster(case.config, plan, folder, shown) as cluster:
            start_s = clock.now()
            wall_s = _serve(case, cluster, recorder, clock)
            journals = cluster.journals()
            counters, spans = collect(cluster)
    metrics = summarize(
        recorder.completions,
        recorder.token_times,
        counters,
        wall_s,
        receipts(journals),
        num_submitted=len(case.prepared.requests),
    )
    write_metrics(folder / "metrics.json", metrics)
    log_rehearsal(metrics)
    write_timeline(folder / "timeline.json", with_repairs(spans, journals), start_s=start_s)
    _check(case, recorder, journals)
    return Outcome(
        run=CaseRun(
            case=case.name,
            round_index=round_index,
            turn=turn,
            wall_s=wall_s,
            token_curve_s=token_curve(recorder.token_times, case.shown) if case.shown else (),
            end_curve_s=end_curve(recorder.completions),
            failures_s=failure_times(journals, start_s),
            repairs=tuple(receipts(journals)),
        ),
        answers={completion.id: completion.tokens for completion in recorder.completions},
    )


def _serve(case: Case, cluster: RunningCluster, recorder: Recorder, clock: Clock) -> float:
    """Every request has ended, and the faults struck meanwhile. Returns the seconds that it took."""
    with Injector(FaultSchedule(faults_of(case.config.fault)), cluster.launcher, clock) as injector:
        wall_s = serve(cluster, case.prepared, recorder, injector)
        if injector.num_waiting:
            raise DejavuError(
                f"case {case.name}: {injector.num_waiting} faults had not come when the last request ended after "
                f"{wall_s:.1f} s; let them come earlier (fault), or serve more (workload)"
            )
    return wall_s


def _check(case: Case, recorder: Recorder, journals: Sequence[RepairJournal]) -> None:
    """Raises DejavuError for a run that cannot be compared."""
    for completion in recorder.completions:
        if completion.finish_reason != "length":
            reason = completion.error or completion.finish_reason
            raise DejavuError(f"case {case.name}: request {completion.id} failed: {reason}")
    if case.config.fault == FaultConfig() and journals:
        raise DejavuError(f"case {case.name}: {journals[0].failures[0].worker} died though no fault was declared")


def failure_times(journals: Sequence[RepairJournal], start_s: float) -> tuple[float, ...]:
    """When workers failed, in seconds after ``start_s`` (wall clock); where nobody knows, when it was seen."""
    return tuple(
        (failure.seen_s if failure.since_s is None else failure.since_s) - start_s
        for journal in journals
        for failure in journal.failures
    )


def check_same(case: str, expected: Answers, got: Answers) -> None:
    """The failure has changed no token. Raises DejavuError naming case, request and the first position that differs."""
    for request_id, tokens in expected.items():
        if got[request_id] == tokens:
            continue
        pairs = zip(tokens, got[request_id], strict=False)
        position = next((at for at, (one, other) in enumerate(pairs) if one != other), len(got[request_id]))
        raise DejavuError(
            f"case {case}: request {request_id} differs from the run without a failure from its new token {position} "
            "on; a repair must never change an answer"
        )
