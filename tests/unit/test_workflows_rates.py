"""``workflow=rates``: offered rates in two cases, simulated, and live on tiny stages."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import ModuleType

import pytest

from dejavu.cli.interruption import Interruption
from dejavu.clock import SystemClock
from dejavu.config import Config
from dejavu.errors import ConfigError, DejavuError
from dejavu.report.progress import SilentProgress
from dejavu.report.rate_runs import RatePoint, RequestTimes, highest, rate_point
from dejavu.run import run
from dejavu.workflows import rates, recovery, streaming, swapping
from dejavu.workflows.preparation import Prepared, cluster_model
from dejavu.workflows.rates_case import Case, prepare_cases, served_as_simulated, simulate_case
from dejavu.workload import load
from dejavu.workload.arrivals import poisson_times

from harness.cluster_kit import configured

SMALL = (
    "workflow=rates",
    "strategy=disaggregated",
    "workload=synthetic",
    "workload.num_requests=12",
    "workload.prompt_tokens=20",
    "workload.max_tokens=8",
    "strategy.microbatch.prompt=2",
    "strategy.microbatch.token=2",
    "profile=given",
    "profile.prompt_time_s=0.2",
    "profile.token_time_s=0.02",
)
SIMULATED = (*SMALL, "model=opt-13b", "rates.live=false", "rates.offered=[1,50]")


def compared(folder: Path, *overrides: str) -> int:
    return run([f"hydra.run.dir={folder}", *overrides], Interruption(SystemClock()))


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "table.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_points_throughput_and_latency_are_those_of_its_requests_also_on_a_scale() -> None:
    requests = [
        RequestTimes(arrival_s=1.0, first_token_s=2.0, end_s=5.0, tokens=4),
        RequestTimes(arrival_s=3.0, first_token_s=5.0, end_s=9.0, tokens=2),
    ]
    point = rate_point("colocated", "live", 0.5, requests)
    assert (point.makespan_s, point.tokens, point.tokens_per_s) == (8.0, 6, 0.75)
    assert (point.normalized_s, point.first_token_s) == (2.0, 1.5)
    fast = rate_point("colocated", "live", 0.5, requests, scale=0.1)
    assert fast.makespan_s == pytest.approx(80.0)
    assert fast.normalized_s == pytest.approx(20.0)
    assert highest([point, fast], "live") == {"colocated": 0.75}
    assert highest([point], "simulated") == {}


def test_throughput_follows_the_offered_rate_until_it_is_full_and_latency_only_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(tmp_path, *SIMULATED) == 0
    rows = table(tmp_path)
    assert [(row["case"], row["offered_per_s"]) for row in rows] == [
        ("colocated", "1"),
        ("disaggregated", "1"),
        ("colocated", "50"),
        ("disaggregated", "50"),
    ]
    for low, high in zip(rows[:2], rows[2:], strict=True):
        assert float(low["tokens_per_s"]) < float(high["tokens_per_s"])
        assert float(low["s_per_token"]) < float(high["s_per_token"])
    facts = json.loads((tmp_path / "rates.json").read_text(encoding="utf-8"))
    assert set(facts["highest"]["planned"]) == {"colocated", "disaggregated"}
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "times the throughput of colocated 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["rates.offered=[]"], "name at least one rate"),
        (["rates.offered=[2,1]"], "the lowest first"),
        (["rates.offered=[0]"], "must be above 0"),
        (["strategy=colocated"], "needs strategy=disaggregated"),
        (["strategy.swapping=on"], "compares without swapping"),
        (["workload.rate=3"], "rates.offered says how fast they come"),
        (["rates.live=true"], "simulate alone with rates.live=false"),
        (["workflow=simulate", "rates.offered=[1]"], "rates is for workflow=rates"),
    ],
)
def test_what_cannot_be_compared_over_rates_is_refused_with_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], reason: str
) -> None:
    without = [text for text in SIMULATED if text.split("=")[0] not in {word.split("=")[0] for word in overrides}]
    assert compared(tmp_path, *without, *overrides) == 2
    assert reason in capsys.readouterr().err


def test_a_live_run_serves_the_simulated_runs_requests_at_the_same_times(tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    trace.write_text("[[20, 8], [20, 5000], [20, 4]]")
    kept = [text for text in SIMULATED if not text.startswith(("workload", "model="))]
    own = ("workload=trace", f"workload.path={trace}", "workload.ignore_eos=true", "model=tiny-llama")
    config = configured(*kept, *own, "model.max_length=64")
    (case, _) = prepare_cases(config)
    assert len(case.simulated.refused) == 1
    model = cluster_model(config, SilentProgress())
    every = load(config.workload, codec=None, vocab_size=model.vocab_size)
    prepared = Prepared(plan=case.simulated.setting.plan, codec=None, requests=every)

    served = served_as_simulated(case, prepared, 50.0).requests

    assert [one.id for one in served] == [one.id for one in case.simulated.requests]
    assert [one.arrival_s for one in served] == poisson_times(2, 50.0, config.workload.seed)


@pytest.mark.parametrize("lost", [("colocated",), ("colocated", "disaggregated")])
def test_points_that_failed_stay_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: tuple[str, ...]
) -> None:
    def simulate_or_fail(case: Case, rate: float) -> RatePoint:
        if case.name in lost:
            raise DejavuError("the reason")
        return simulate_case(case, rate)

    monkeypatch.setattr(rates, "simulate_case", simulate_or_fail)

    assert compared(tmp_path, *SIMULATED) == 1

    facts = json.loads((tmp_path / "rates.json").read_text(encoding="utf-8"))
    assert len(facts["points"]) == 4 - 2 * len(lost)
    assert {(one["case"], one["reason"]) for one in facts["failed"]} == {(name, "the reason") for name in lost}


@pytest.mark.parametrize(
    ("workflow", "folder"), [(rates, "cases"), (recovery, "cases"), (swapping, "cases"), (streaming, "clusters")]
)
def test_a_folder_with_an_earlier_comparison_is_refused_before_anything_runs(
    tmp_path: Path, workflow: ModuleType, folder: str
) -> None:
    (tmp_path / folder).mkdir()
    with pytest.raises(ConfigError, match="holds an earlier comparison"):
        workflow.run(Config(), tmp_path)


@pytest.mark.grid
def test_live_points_stand_beside_the_simulated_ones(tmp_path: Path) -> None:
    assert compared(tmp_path, *SMALL, "model=tiny-llama", "rates.offered=[4]") == 0
    assert [(row["case"], row["source"]) for row in table(tmp_path)] == [
        ("colocated", "simulated"),
        ("disaggregated", "simulated"),
        ("colocated", "live"),
        ("disaggregated", "live"),
    ]
    assert (tmp_path / "cases" / "disaggregated-4" / "metrics.json").is_file()


@pytest.mark.grid
def test_a_rehearsal_s_points_are_in_the_seconds_of_the_machines_that_it_stands_for(tmp_path: Path) -> None:
    rehearsed = ("model.compute=modelled", "model.time_scale=0.5", "model=opt-13b", "model.max_length=64")
    assert compared(tmp_path, *SMALL, *rehearsed, "rates.offered=[1]") == 0
    points = {(row["case"], row["source"]): float(row["makespan_s"]) for row in table(tmp_path)}
    for case in ("colocated", "disaggregated"):
        # Without the scale it would be half; slower it may be on a machine that has other things to do.
        assert points[case, "live"] > 0.8 * points[case, "simulated"]
