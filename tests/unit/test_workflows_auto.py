"""``strategy=auto``: what the planner chooses becomes the strategy that runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dejavu.config import Scheduling, StrategyMode
from dejavu.errors import ConfigError, InfeasibleError
from dejavu.planning.document import document
from dejavu.planning.search import plan
from dejavu.planning.sizing import plan_with_rows
from dejavu.report.progress import SilentProgress
from dejavu.workflows import generate
from dejavu.workflows.auto import decided
from dejavu.workflows.plan import machines, question
from dejavu.workflows.preparation import prepare

from harness.cluster_kit import configured
from harness.planning_kit import asked

AUTO = (
    "strategy=auto",
    "model=tiny-llama",
    "workload=synthetic",
    "workload.num_requests=8",
    "workload.prompt_tokens=8",
    "workload.max_tokens=10",
    "cluster.num_machines=2",
    "strategy.microbatch.token=2",
    "profile=given",
)
BALANCED = ("profile.prompt_time_s=1", "profile.token_time_s=0.1")


def test_balanced_prompts_and_tokens_are_split(tmp_path: Path) -> None:
    config, answer = decided(configured(*AUTO, *BALANCED), tmp_path, SilentProgress())
    assert config.strategy.mode is StrategyMode.disaggregated
    assert config.strategy.depths == {"prompt": 1, "token": 1}
    assert config.strategy.num_in_flight == 1
    assert answer is not None
    assert answer.chosen is not None
    assert config.strategy.microbatch.token == answer.chosen.rows
    assert config.strategy.microbatch.prompt <= config.strategy.microbatch.token


def test_a_split_of_whole_microbatches_has_one_more_while_its_prompts_are_computed(tmp_path: Path) -> None:
    config, _ = decided(configured(*AUTO, *BALANCED, "strategy.scheduling=microbatch"), tmp_path, SilentProgress())
    assert config.strategy.mode is StrategyMode.disaggregated
    assert config.strategy.num_in_flight == 2


def test_long_answers_are_left_in_one_pipeline(tmp_path: Path) -> None:
    overrides = ("profile.prompt_time_s=0.01", "profile.token_time_s=0.1", "strategy.scheduling=microbatch")
    config, _ = decided(configured(*AUTO, *overrides), tmp_path, SilentProgress())
    assert config.strategy.mode is StrategyMode.colocated
    assert config.strategy.stages == 2
    assert config.strategy.scheduling is Scheduling.microbatch


TIGHT = (
    "workload.max_tokens=60",
    "cluster.num_machines=4",
    "cluster.pcie_gbps=1000",
    "strategy.microbatch.token=8",
    "strategy.microbatch.prompt=2",
)


@pytest.mark.parametrize("scheduling", ["row", "microbatch"])
@pytest.mark.parametrize("swapping", ["off", "auto"])
def test_what_the_planner_chooses_is_taken_by_the_cluster_at_every_size_of_memory(
    tmp_path: Path, swapping: str, scheduling: str
) -> None:
    outcomes = set()
    config = configured(*AUTO, *BALANCED, *TIGHT, f"strategy.swapping={swapping}", f"strategy.scheduling={scheduling}")
    for kilobytes in (20, 120, 160, 200, 240, 300, 400, 600, 1000, 2000, 10**5):
        config.cluster.device_memory_gb = kilobytes / 10**6
        try:
            own, answer = decided(config, tmp_path, SilentProgress())
        except InfeasibleError:
            outcomes.add("infeasible")
            continue
        assert answer is not None
        assert answer.chosen is not None
        plan = prepare(own, SilentProgress()).plan
        assert plan.token_pipeline.microbatch_rows == answer.chosen.rows <= 8
        assert (plan.token_pipeline.in_flight, plan.swapping) == (answer.chosen.in_flight, answer.chosen.swapping)
        outcomes.add(f"{plan.mode}, {plan.swapping}")
    assert {"infeasible", "colocated, False"} <= outcomes
    assert any("True" in outcome for outcome in outcomes) == (swapping == "auto")


def test_rows_have_room_for_the_longest_request_and_no_more(tmp_path: Path) -> None:
    config, answer = decided(configured(*AUTO, *BALANCED), tmp_path, SilentProgress())
    assert config.model.max_length == 18
    assert answer is not None
    assert document(answer)["max_length"] == 18
    service, _ = decided(configured("workflow=serve", *AUTO, *BALANCED), tmp_path, SilentProgress())
    assert service.model.max_length == 128, "clients may ask for more than the example"
    short, _ = decided(configured(*AUTO, *BALANCED, "model.max_length=12"), tmp_path, SilentProgress())
    assert short.model.max_length == 12


@pytest.mark.parametrize(("compute", "devices"), [("real", 1), ("modelled", 2)])
def test_a_worker_that_computes_has_one_device_of_its_machine(compute: str, devices: int) -> None:
    two = ("cluster.devices_per_machine=2", "cluster.device_memory_gb=1", f"model.compute={compute}")
    assert machines(configured(*AUTO, *BALANCED, *two)).memory_bytes == devices * 10**9


def test_the_answer_is_on_disk_before_the_cluster_is_asked(tmp_path: Path) -> None:
    decided(configured(*AUTO, *BALANCED), tmp_path, SilentProgress())
    assert json.loads((tmp_path / "plan.json").read_text())["feasible"] is True


def test_the_bandwidth_that_was_measured_serves_where_none_is_declared(tmp_path: Path) -> None:
    points = [[1, 8, 0.2], [8, 8, 1.0]]
    profile = {
        "model": "tiny-llama",
        "hardware": "h",
        "devices": 1,
        "engine": "e",
        "prompt_points": points,
        "step_points": points,
        "copy_bytes_per_s": 1e9,
    }
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"source": "s", "licence": "l", "profiles": [profile]}))
    measured = ("profile=measured", f"profile.path={path}")
    kept = [one for one in AUTO if one != "profile=given"]
    assert question(configured(*kept, *measured)).machines.pcie_gbps == 8
    assert question(configured(*kept, *measured, "cluster.pcie_gbps=2")).machines.pcie_gbps == 2


def test_a_strategy_that_is_declared_is_left_as_it_is(tmp_path: Path) -> None:
    config = configured("strategy=colocated")
    assert decided(config, tmp_path, SilentProgress()) == (config, None)


def test_what_fits_nowhere_is_infeasible_with_its_plan(tmp_path: Path) -> None:
    config = configured(*AUTO, *BALANCED, "cluster.device_memory_gb=0.00001")
    with pytest.raises(InfeasibleError, match="infeasible because"):
        decided(config, tmp_path, SilentProgress())
    assert json.loads((tmp_path / "plan.json").read_text())["feasible"] is False


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.num_machines=null", "cluster.num_machines"),
        ("strategy.split.prompt=2", "strategy.split"),
        ("strategy.replication=1", "strategy.replication"),
        ("strategy.stream_to=memory", "strategy.stream_to"),
        ("fault.kill=[{worker: w0, step: 1}]", "fault"),
        ("profile=measured", "profile"),
        ("workflow=profile", "workflow=generate and workflow=serve and workflow=plan"),
    ],
)
def test_what_the_planner_is_to_choose_cannot_be_declared_beside_it(override: str, words: str) -> None:
    kept = [one for one in AUTO if not (override.startswith("profile=") and one == "profile=given")]
    times = () if override == "profile=measured" else BALANCED
    with pytest.raises(ConfigError, match=words) as caught:
        configured(*kept, *times, override)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("workflow", ["generate", "serve"])
def test_a_number_of_machines_that_a_strategy_would_ignore_is_refused(workflow: str) -> None:
    own = (f"workflow={workflow}", "strategy=colocated", "strategy.stages=2")
    assert configured(*own, "cluster.num_machines=2").cluster.num_machines == 2
    with pytest.raises(ConfigError, match="strategy=colocated runs on 2 workers"):
        configured(*own, "cluster.num_machines=4")


def test_no_more_rows_are_planned_than_the_workload_can_fill() -> None:
    one = asked(rows=16, num_machines=2)
    few = replace(one, lengths=replace(one.lengths, num_requests=4))
    many = replace(one, lengths=replace(one.lengths, num_requests=1000))
    chosen_few, chosen_many = plan_with_rows(few).chosen, plan_with_rows(many).chosen
    assert chosen_few is not None
    assert chosen_many is not None
    assert chosen_few.rows * chosen_few.num_machines <= 4
    assert chosen_many.rows == 16
    assert plan_with_rows(replace(many, rows=3)).question.rows == 3


def test_where_no_size_fits_the_smallest_ones_answer_is_given() -> None:
    one = asked(rows=4, memory_bytes=1)
    assert plan_with_rows(one).reason == plan(replace(one, rows=1)).reason


@pytest.mark.slow
def test_a_run_keeps_the_planners_prediction_beside_its_plan(tmp_path: Path) -> None:
    generate.run(configured(*AUTO, *BALANCED), tmp_path)
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["mode"] == "disaggregated"
    assert found["planner"]["split"] == {"prompt": 1, "token": 1}
    assert found["planner"]["predicted"]["requests_per_s"] > 0
    assert found["planner"]["inputs"]["profile"]["kind"] == "given"
    assert len((tmp_path / "completions.jsonl").read_text().splitlines()) == 8
