"""The comparison's own decisions: the declaration of each case, a run that cannot be compared, what is written."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dejavu.clock import VirtualClock
from dejavu.config import FaultConfig, Recovery, RecoveryCase, RecoveryFigure
from dejavu.control.journal import RepairJournal
from dejavu.errors import DejavuError
from dejavu.ids import RequestId
from dejavu.report.figure_style import Caption
from dejavu.report.progress import SilentProgress
from dejavu.report.spans import Span
from dejavu.report.timeline import read_timeline
from dejavu.request import Completion, Request
from dejavu.workflows import recovery, recovery_case
from dejavu.workflows.recovery_case import Case, case_config, check_same, prepare_cases, run_case

from harness.cluster_kit import configured
from harness.receipts import START_S, journal

SMALL = (
    "experiment=fig14",
    "model=tiny-llama",
    "model.num_layers=4",
    "workload.num_requests=8",
    "workload.prompt_tokens=4",
    "workload.max_tokens=3",
    "fault.kill=[{worker: w2, step: 2}]",
)


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Case]:
    monkeypatch.setenv("DEJAVU_CACHE", str(tmp_path / "cache"))
    return {case.name: case for case in prepare_cases(configured(*SMALL), SilentProgress())}


def test_only_the_case_with_replicas_pays_for_them_and_only_none_has_no_fault() -> None:
    config = configured("experiment=fig14")
    made = {case: case_config(config, case) for case in RecoveryCase}
    assert {case: one.strategy.replication for case, one in made.items()} == {
        RecoveryCase.none: 0,
        RecoveryCase.replica: 1,
        RecoveryCase.recompute: 0,
        RecoveryCase.restart: 0,
    }
    assert made[RecoveryCase.restart].strategy.recovery is Recovery.restart
    assert made[RecoveryCase.recompute].strategy.recovery is Recovery.recompute
    assert [case for case, one in made.items() if one.fault == FaultConfig()] == [RecoveryCase.none]
    assert {one.strategy.standby for one in made.values()} == {1}


def test_every_case_serves_the_same_requests_and_shows_the_same_rows(cases: dict[str, Case]) -> None:
    assert list(cases) == ["none", "replica", "recompute", "restart"]
    assert all(case.prepared.requests == cases["none"].prepared.requests for case in cases.values())
    assert {case.shown for case in cases.values()} == {tuple(one.id for one in cases["none"].prepared.requests[:4])}
    assert cases["replica"].prepared.plan.replication == 1
    assert cases["restart"].prepared.plan.recovery == "restart"
    assert cases["restart"].prepared.plan.standby == ("w4",)


class Stage:
    """The world around a run, without a cluster: what a test wants to have happened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journals: tuple[RepairJournal, ...] = (journal(),)
        self.finish_reason = "length"
        self.steps = 3
        self.signals: list[tuple[str, int]] = []
        monkeypatch.setattr(recovery_case, "running_cluster", self._running)
        monkeypatch.setattr(recovery_case, "serve", self._serve)
        monkeypatch.setattr(recovery_case, "collect", lambda *_: ({}, {"w0": [Span("step", "compute", START_S, 0.1)]}))

    @contextmanager
    def _running(self, *_: object) -> Iterator[Any]:
        launcher = SimpleNamespace(signal=lambda name, signum: self.signals.append((name, signum)))
        yield SimpleNamespace(launcher=launcher, journals=lambda: self.journals)

    def _serve(self, cluster: object, prepared: Any, recorder: Any, injector: Any) -> float:
        injector.began()
        for step in range(self.steps):
            injector.stepped(0, step + 1)
        requests: Sequence[Request] = prepared.requests
        for number, request in enumerate(requests):
            end_s = 1.0 + number
            recorder.ended(completion(request, self.finish_reason, end_s), (0.5, 0.75, end_s))
        return 9.0


def completion(request: Request, finish_reason: str, end_s: float) -> Completion:
    return Completion(
        id=request.id,
        prompt_tokens=4,
        tokens=(7, 8, 9),
        text="",
        finish_reason=finish_reason,
        arrival_s=0.0,
        first_token_s=0.5,
        end_s=end_s,
        error="w0 said so" if finish_reason == "error" else None,
    )


def run_one(case: Case, folder: Path) -> recovery_case.Outcome:
    clock = VirtualClock(START_S - 2.0)
    return run_case(case, folder, SilentProgress(), clock, round_index=0, turn=1)


def test_a_run_keeps_its_curves_its_repairs_and_its_files(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stage = Stage(monkeypatch)
    outcome = run_one(cases["replica"], tmp_path / "run")
    assert outcome.run.token_curve_s == (0.5, 0.75, 4.0)
    assert outcome.run.latency_s == 4.0
    assert (outcome.run.wall_s, len(outcome.run.end_curve_s)) == (9.0, 8)
    assert outcome.run.failures_s == (2.0,)
    assert outcome.run.repairs[0]["tier"] == "replica"
    assert stage.signals == [("w2", 9)]
    assert json.loads((tmp_path / "run/metrics.json").read_text())["repairs"][0]["number"] == 1
    assert json.loads((tmp_path / "run/plan.json").read_text())["replication"] == 1
    rows = [event.args["name"] for event in read_timeline(tmp_path / "run/timeline.json").traceEvents
            if event.name == "process_name" and event.args]  # fmt: skip
    assert rows == ["cluster", "w0"]


def test_a_run_in_which_a_fault_did_not_come_is_no_run_of_its_case(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stage = Stage(monkeypatch)
    stage.steps = 1
    with pytest.raises(DejavuError, match="case restart: 1 faults had not come"):
        run_one(cases["restart"], tmp_path / "run")


def test_a_run_with_a_request_that_failed_is_an_error_with_its_reason(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stage = Stage(monkeypatch)
    stage.finish_reason = "error"
    with pytest.raises(DejavuError, match=r"case replica: request .* failed: w0 said so"):
        run_one(cases["replica"], tmp_path / "run")


def test_a_failure_in_the_run_that_should_have_none_is_an_error(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Stage(monkeypatch)
    with pytest.raises(DejavuError, match="case none: w2 died though no fault was declared"):
        run_one(cases["none"], tmp_path / "run")


def test_other_tokens_than_without_a_failure_are_an_error_that_names_the_first_one() -> None:
    expected = {RequestId("a"): (1, 2, 3), RequestId("b"): (4, 5, 6)}
    check_same("replica", expected, dict(expected))
    with pytest.raises(DejavuError, match=r"case replica: request b differs .* token 1 on"):
        check_same("replica", expected, {**expected, RequestId("b"): (4, 9, 6)})


def test_every_case_comes_at_every_place_once_in_as_many_rounds(cases: dict[str, Case]) -> None:
    listed = list(cases.values())
    orders = [[case.name for case in recovery.rotated(listed, index)] for index in range(4)]
    assert orders[0] == list(cases)
    assert all(sorted(places) == sorted(cases) for places in [*orders, *zip(*orders, strict=True)])


def test_the_results_are_numbers_a_figure_and_a_table_with_the_papers(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stage = Stage(monkeypatch)
    runs = [run_one(cases[name], tmp_path / name).run for name in ("replica", "restart")]
    stage.journals = ()
    runs.append(run_one(cases["none"], tmp_path / "none").run)
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    caption = Caption(title="T", subtitle="S", source="machine")
    config = configured(*SMALL, "comparison.cases=[none,replica,restart]")
    recovery.write_results(config, runs, caption, tmp_path, console)
    written = json.loads((tmp_path / "recovery.json").read_text())
    assert written["cases"]["replica"]["ratio"] == 1.0
    assert written["paper"] == {"replica": 1.24, "restart": 1.91}
    assert written["restart_over_replica"] == 1.0
    assert [one["case"] for one in written["runs"]] == ["replica", "restart", "none"]
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "1.24" in shown
    assert "replica: w2 died (killed by signal 9), standby w3 took its place" in shown


def test_the_paper_has_a_number_for_two_figures_of_three() -> None:
    assert recovery.paper_of(RecoveryFigure.fig04) == {}
    assert recovery.paper_of(RecoveryFigure.fig15) == {"restart_over_replica": 1.16}
