"""``workflow=simulate`` from the command line to its files."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from dejavu.cli.interruption import Interruption
from dejavu.clock import SystemClock
from dejavu.report.figure_style import Caption
from dejavu.report.timeline import read_timeline
from dejavu.run import run
from dejavu.workflows import simulate as simulate_workflow
from dejavu.workflows.simulation_comparison import coming
from dejavu.workload.arrivals import with_arrivals

from harness.cluster_kit import configured
from harness.sim_kit import asked

ORIGINALS = json.loads((Path(__file__).parent.parent / "data" / "original_simulators.json").read_text(encoding="utf-8"))
FOUR_STAGES = ("strategy=colocated", "strategy.stages=4", "strategy.scheduling=microbatch")
SMALL = (
    "workflow=simulate",
    "model=opt-13b",
    "profile.prompt_time_s=1",
    "profile.token_time_s=0.04",
    "workload=synthetic",
    "workload.num_requests=24",
    "workload.prompt_tokens=100",
    "workload.max_tokens=20",
)


def simulated(folder: Path, *overrides: str) -> int:
    """The exit code; the run's files are in ``folder``."""
    return run([f"hydra.run.dir={folder}", *overrides], Interruption(SystemClock()))


def document(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "simulation.json").read_text(encoding="utf-8"))
    return found


def trace_file(folder: Path, tokens: list[int]) -> Path:
    """A trace of requests that all come at once, in order."""
    path = folder / "trace.jsonl"
    lines = [json.dumps({"timestamp": 0, "input_length": 1, "output_length": new}) for new in tokens]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_disaggregated_run_leaves_all_its_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    split = ("strategy=disaggregated", "strategy.split.prompt=2", "strategy.split.token=2")

    assert simulated(out, *SMALL, *split, "cluster.link_gbps=40", "cluster.price_per_hour=3.6") == 0

    facts = document(out)
    assert facts["mode"] == "disaggregated"
    assert len(facts["finish_s"]) == 24
    assert max(facts["finish_s"]) == facts["makespan_s"]
    assert facts["tokens"] == 24 * 20
    assert facts["cost"] == pytest.approx(4 * facts["makespan_s"] * 3.6 / 3600)
    for stage in facts["stages"]:
        assert stage["busy_s"] + stage["idle_s"] == pytest.approx(facts["makespan_s"])
        assert stage["busy_share"] == pytest.approx(stage["busy_s"] / facts["makespan_s"])
    assert [stage["pipeline"] for stage in facts["stages"]] == ["prompt", "prompt", "token", "token"]
    assert read_timeline(out / "timeline.json").traceEvents
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "plan.json").read_text())["mode"] == "disaggregated"
    with (out / "table.csv").open() as file:
        assert [row["worker"] for row in csv.DictReader(file)] == ["w0", "w1", "w2", "w3"]
    with (out / "requests.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 24


def test_failures_say_what_they_cost(tmp_path: Path) -> None:
    kill = "fault.kill=[{worker: w1, at_s: 0.8}]"

    assert simulated(tmp_path / "out", *SMALL, *FOUR_STAGES, "strategy.replication=1", kill) == 0

    facts = document(tmp_path / "out")
    (repair,) = facts["repairs"]
    assert repair["workers"] == ["w1"]
    assert facts["lost_s"] == pytest.approx(facts["makespan_s"] - facts["makespan_without_failures_s"])
    assert facts["lost_s"] > 2.0
    assert facts["recomputed"].keys() == {"prompt_tokens_recomputed", "tokens_replayed"}


def test_replicas_have_workers_of_their_own(tmp_path: Path) -> None:
    assert simulated(tmp_path / "out", *SMALL, "strategy=colocated", "strategy.stages=2", "simulate.replicas=3") == 0

    facts = document(tmp_path / "out")
    assert [(stage["worker"], stage["stage"]) for stage in facts["stages"]] == [
        (f"w{number}", number % 2) for number in range(6)
    ]


@pytest.mark.parametrize("case", ORIGINALS["cases"], ids=lambda case: case["name"][0])
def test_the_reference_mode_ends_when_the_original_simulator_does(tmp_path: Path, case: dict[str, Any]) -> None:
    path, depth, expected = trace_file(tmp_path, case["trace"]), case["num_machines"], case["colocated"]

    code = simulated(
        tmp_path / "out",
        "workflow=simulate",
        "simulate.reference=true",
        "strategy=colocated",
        f"strategy.stages={depth}",
        f"profile.prompt_time_s={expected['prompt_ms'] * depth / 1e3}",
        f"profile.token_time_s={expected['token_ms'] * depth / 1e3}",
        "workload=trace",
        f"workload.path={path}",
        f"workload.rate={case['rate']}",
    )

    assert code == 0
    facts = document(tmp_path / "out")
    assert facts["reference"] is True
    assert facts["makespan_s"] == pytest.approx(expected["makespan_s"], abs=1e-6)
    assert facts["finish_s"] == pytest.approx(expected["finish_s"], abs=1e-6)


def test_the_reference_mode_delays_tokens_by_the_cache_time(tmp_path: Path) -> None:
    case = next(case for case in ORIGINALS["cases"] if case["name"].startswith("D"))
    expected = next(one for one in case["disaggregated"] if one["split"] == [2, 1] and one["cache_ms"] == 50.0)

    code = simulated(
        tmp_path / "out",
        "workflow=simulate",
        "simulate.reference=true",
        "simulate.cache_time_ms=50",
        "strategy=disaggregated",
        "strategy.split.prompt=2",
        "profile.prompt_time_s=0.06",
        "profile.token_time_s=0.006",
        "workload=trace",
        f"workload.path={trace_file(tmp_path, case['trace'])}",
    )

    assert code == 0
    assert document(tmp_path / "out")["finish_s"] == pytest.approx(expected["finish_s"], abs=1e-6)


def test_a_request_that_does_not_fit_is_named_and_the_others_are_served(tmp_path: Path) -> None:
    path = trace_file(tmp_path, [5, 5000, 5])

    code = simulated(
        tmp_path / "out",
        "workflow=simulate",
        "model=opt-13b",
        "strategy=colocated",
        "profile.prompt_time_s=1",
        "profile.token_time_s=0.1",
        "workload=trace",
        f"workload.path={path}",
    )

    assert code == 0
    facts = document(tmp_path / "out")
    assert facts["requests"] == {
        "served": 2,
        "refused": {"trace-1": "5001 positions exceed the model's max_length 2048"},
    }


def test_a_stage_that_does_not_fit_its_machine_is_infeasible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulated(tmp_path / "out", *SMALL, "strategy=colocated", "cluster.device_memory_gb=16") == 3

    assert "infeasible: colocated stage 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["simulate.cache_time_ms=5"], "simulate.cache_time_ms=5: is for simulate.reference=true"),
        (["simulate.reference=true", "simulate.replicas=2"], "the original simulators know no replicas"),
        (["simulate.swapping=true"], "simulate.swapping=true needs cluster.pcie_gbps"),
        (["simulate.replicas=0"], "simulate.replicas=0: must be from 1 to 1000"),
        (["simulate.failures_per_hour=-1"], "simulate.failures_per_hour=-1: must be at least 0"),
        (["fault.stop=[{worker: w0, at_s: 1}]"], "workflow=simulate knows deaths alone"),
        (["fault.kill=[{worker: w0, phase: prompt}]"], "workflow=simulate takes at_s or step"),
        (["cluster.num_machines=4"], "cluster.num_machines=4: strategy=disaggregated is simulated on 2 machines"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], reason: str
) -> None:
    assert simulated(tmp_path / "out", *SMALL, *overrides) == 2

    assert reason in capsys.readouterr().err


def test_a_number_of_machines_that_is_the_strategys_is_taken() -> None:
    machines = ("cluster.num_machines=4", "strategy=colocated", "strategy.stages=2", "simulate.replicas=2")
    assert configured(*SMALL, *machines).cluster.num_machines == 4


def test_the_figure_names_the_times_that_were_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captions: list[Caption] = []
    monkeypatch.setattr(
        simulate_workflow, "draw_traces", lambda path, panels, caption, until_s: captions.append(caption)
    )

    assert simulated(tmp_path / "out", *SMALL, "profile=roofline") == 0

    assert [one.source for one in captions] == ["simulated; times given"]


def test_a_comparison_says_when_its_requests_come() -> None:
    requests = asked([3, 4])
    assert coming(requests) == "all there at the start"
    assert coming(with_arrivals(requests, [0.0, 2.5])) == "that come within 2.5 s"


SMALL_COMPARISON = (
    *SMALL,
    "cluster.price_per_hour=3.6",
    "strategy.scheduling=microbatch",
    "strategy.microbatch.token=4",
    "simulate.compare.microbatches=[4]",
)


def test_a_comparison_by_machines_names_what_is_best_and_what_is_infeasible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_machines = ("simulate.compare.over=machines", "simulate.compare.machines=[1,4]")

    assert simulated(tmp_path / "out", *SMALL_COMPARISON, *by_machines, "cluster.device_memory_gb=40") == 3

    with (tmp_path / "out" / "table.csv").open() as file:
        rows = {(row["case"], row["machines"]): row for row in csv.DictReader(file)}
    assert rows["baseline", "4"]["arrangement"] == "4"
    assert "+" in rows["disaggregated", "4"]["arrangement"]
    assert float(rows["baseline", "4"]["cost"]) == pytest.approx(
        4 * float(rows["baseline", "4"]["makespan_s"]) / 1000, rel=1e-4
    )
    assert rows["disaggregated", "1"]["makespan_s"] == "-"
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr()
    assert "disaggregated, 1 machines: disaggregated cannot use 1 machines" in told.out
    assert "times shorter than baseline" in told.out
    assert "points failed, for the reasons above" in told.err


def test_a_comparison_by_rows_has_a_line_for_each_number_with_and_without_early_stops(tmp_path: Path) -> None:
    code = simulated(
        tmp_path / "out",
        *SMALL_COMPARISON,
        "simulate.compare.over=microbatches",
        "simulate.compare.machines=[2]",
        "simulate.compare.microbatches=[2,4]",
        "simulate.compare.cases=[baseline]",
        "simulate.compare.early_stops=[true,false]",
        "workload.median_tokens=10",
        "workload.sigma=0.7",
    )

    assert code == 0
    with (tmp_path / "out" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["case"], row["rows"]) for row in rows] == [
        ("baseline", "2"),
        ("baseline", "4"),
        ("baseline, no early stops", "2"),
        ("baseline, no early stops", "4"),
    ]


def test_traces_show_both_ways_to_use_the_machines(tmp_path: Path) -> None:
    split = ("strategy=disaggregated", "strategy.split.prompt=2", "strategy.split.token=2", "strategy.in_flight=5")

    assert simulated(tmp_path / "out", *SMALL_COMPARISON, *split, "simulate.compare.over=traces") == 0

    with (tmp_path / "out" / "table.csv").open() as file:
        assert [row["case"] for row in csv.DictReader(file)] == [
            "colocated, 4 machines",
            "disaggregated, 2 + 2 machines",
        ]
    assert (tmp_path / "out" / "figure.png").exists()


def test_a_comparison_of_nothing_feasible_is_infeasible(tmp_path: Path) -> None:
    by_machines = ("simulate.compare.over=machines", "simulate.compare.machines=[2]")

    assert simulated(tmp_path / "out", *SMALL_COMPARISON, *by_machines, "cluster.device_memory_gb=1") == 3


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["simulate.compare.machines=[2]"], "simulate.compare needs simulate.compare.over"),
        (["simulate.compare.over=machines", "simulate.compare.machines=[]"], "simulate.compare.machines"),
        (["simulate.compare.over=machines", "simulate.compare.cases=[baseline,baseline]"], "none twice"),
        (["simulate.compare.over=microbatches"], "takes one number of machines"),
        (["simulate.compare.over=traces", "strategy=colocated"], "shows strategy=disaggregated beside"),
        (["simulate.compare.over=machines", "simulate.compare.lengths=[100]"], "is for simulate.compare.over=swapping"),
        (["simulate.compare.over=swapping", "strategy=colocated"], "name at least one number of tokens"),
        (["simulate.compare.over=swapping", "simulate.compare.lengths=[5000]"], "needs strategy=colocated"),
        (["simulate.compare.over=machines", "simulate.replicas=2"], "how many replicas are best by itself"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], reason: str
) -> None:
    assert simulated(tmp_path / "out", *SMALL, *overrides) == 2

    assert reason in capsys.readouterr().err


def test_simulate_is_refused_for_another_workflow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulated(tmp_path / "out", "simulate.replicas=2") == 2

    assert "simulate is for workflow=simulate" in capsys.readouterr().err


def test_a_sweep_of_simulated_and_refused_points_leaves_a_table_of_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ("-m", "strategy=colocated", "strategy.stages=2,100,4", f"hydra.sweep.dir={tmp_path}")
    assert run([*sweep, *SMALL], Interruption(SystemClock())) == 2
    rows = list(csv.DictReader((tmp_path / "table.csv").open(encoding="utf-8")))
    assert [(row["strategy.stages"], row["outcome"]) for row in rows] == [
        ("2", "done"),
        ("100", "wrong_config"),
        ("4", "done"),
    ]
    assert float(rows[0]["makespan_s"]) == pytest.approx(document(tmp_path / "0")["makespan_s"], rel=1e-5)
    assert "1 of 3 points failed:\n  job 1 (strategy.stages=100): strategy.stages=100: " in capsys.readouterr().err


SWAPPING = (
    "workflow=simulate",
    "model=opt-13b",
    "profile=given",
    "profile.prompt_time_s=0.1",
    "profile.token_time_s=0.04",
    "strategy=colocated",
    "strategy.stages=3",
    "strategy.microbatch.token=2",
    "workload=synthetic",
    "workload.prompt_tokens=20",
    "simulate.compare.over=swapping",
    "simulate.compare.microbatches=[2]",
    "simulate.compare.lengths=[40,60]",
)


def test_swapping_over_lengths_pays_with_a_fast_bus_and_not_with_a_slow_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, gbps in (("fast", 1000), ("slow", 0.5)):
        assert simulated(tmp_path / name, *SWAPPING, f"cluster.pcie_gbps={gbps}") == 0
    gains = {}
    for name in ("fast", "slow"):
        with (tmp_path / name / "table.csv").open(encoding="utf-8") as file:
            gains[name] = [(row["length"], float(row["gain"]), row["rule_pays"]) for row in csv.DictReader(file)]
        assert (tmp_path / name / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert all(gain > 1.5 and pays == "yes" for _, gain, pays in gains["fast"])
    assert all(gain < 1 and pays == "no" for _, gain, pays in gains["slow"])
    assert "always to swap" in capsys.readouterr().out


def test_a_length_that_does_not_fit_is_named_and_the_others_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ("simulate.compare.lengths=[40,20000]", "cluster.device_memory_gb=12", "cluster.pcie_gbps=1000")
    assert simulated(tmp_path, *SWAPPING, *lengths) == 3
    told = capsys.readouterr()
    assert "B = 2, 20000 tokens: infeasible" in told.out
    assert "1 of 2 points failed" in told.err
    with (tmp_path / "table.csv").open(encoding="utf-8") as file:
        assert [row["gain"] != "-" for row in csv.DictReader(file)] == [True, False]


def test_a_sweep_whose_interrupt_was_lost_in_a_destructor_begins_no_other_point(tmp_path: Path) -> None:
    interruption = Interruption(SystemClock())
    with pytest.raises(KeyboardInterrupt):
        interruption.receive(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        run(["-m", "strategy=colocated", "strategy.stages=2,4", f"hydra.sweep.dir={tmp_path}", *SMALL], interruption)
    assert not list(tmp_path.rglob("simulation.json"))
