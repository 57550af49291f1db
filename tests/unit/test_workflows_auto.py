"""``strategy=auto``: what the planner chooses becomes the strategy that runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dejavu.config import Scheduling, StrategyMode
from dejavu.config.strategy import Swapping
from dejavu.errors import ConfigError, InfeasibleError
from dejavu.planning.search import plan
from dejavu.planning.sizing import plan_with_rows
from dejavu.report.progress import SilentProgress
from dejavu.workflows import generate
from dejavu.workflows.auto import decided

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


@pytest.mark.parametrize(("swapping", "rows"), [("off", 1), ("auto", 2)])
def test_the_planner_swaps_where_it_may_and_twice_the_rows_fit_so(tmp_path: Path, swapping: str, rows: int) -> None:
    overrides = (
        "workload.max_tokens=60",
        "cluster.num_machines=4",
        "cluster.device_memory_gb=0.0006",
        "cluster.pcie_gbps=1000",
        "strategy.microbatch.token=8",
        f"strategy.swapping={swapping}",
    )
    config, _ = decided(configured(*AUTO, *BALANCED, *overrides), tmp_path, SilentProgress())
    assert config.strategy.microbatch.token == rows
    assert config.strategy.swapping is (Swapping.off if swapping == "off" else Swapping.on)


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
        ("workflow=profile", "workflow=generate and workflow=plan"),
    ],
)
def test_what_the_planner_is_to_choose_cannot_be_declared_beside_it(override: str, words: str) -> None:
    kept = [one for one in AUTO if not (override.startswith("profile=") and one == "profile=given")]
    times = () if override == "profile=measured" else BALANCED
    with pytest.raises(ConfigError, match=words) as caught:
        configured(*kept, *times, override)
    assert len(str(caught.value).splitlines()) <= 3


def test_no_more_rows_are_planned_than_the_workload_can_fill() -> None:
    question = asked(rows=16, num_machines=2)
    few = replace(question, lengths=replace(question.lengths, num_requests=4))
    many = replace(question, lengths=replace(question.lengths, num_requests=1000))
    chosen_few, chosen_many = plan_with_rows(few).chosen, plan_with_rows(many).chosen
    assert chosen_few is not None
    assert chosen_many is not None
    assert chosen_few.rows * chosen_few.num_machines <= 4
    assert chosen_many.rows == 16
    assert plan_with_rows(replace(many, rows=3)).question.rows == 3


def test_where_no_size_fits_the_smallest_ones_answer_is_given() -> None:
    question = asked(rows=4, memory_bytes=1)
    assert plan_with_rows(question).reason == plan(replace(question, rows=1)).reason


@pytest.mark.slow
def test_a_run_keeps_the_planners_prediction_beside_its_plan(tmp_path: Path) -> None:
    generate.run(configured(*AUTO, *BALANCED), tmp_path)
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["mode"] == "disaggregated"
    assert found["planner"]["split"] == {"prompt": 1, "token": 1}
    assert found["planner"]["predicted"]["requests_per_s"] > 0
    assert found["planner"]["inputs"]["profile"]["kind"] == "given"
    assert len((tmp_path / "completions.jsonl").read_text().splitlines()) == 8
