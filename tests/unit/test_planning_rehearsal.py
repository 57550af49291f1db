"""A model and a profile as a rehearsal has them, and what a rehearsal must satisfy."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from dejavu.control.memory import stage_memory
from dejavu.control.placement import place
from dejavu.control.plan import Plan
from dejavu.control.summary import summary
from dejavu.errors import ConfigError, InfeasibleError
from dejavu.ids import Epoch
from dejavu.models.spec import ModelSpec
from dejavu.models.stage_share import StageShare
from dejavu.planning.costs import Costs
from dejavu.planning.rehearsal import rehearsed, scaled_heads
from dejavu.report.progress import SilentProgress
from dejavu.workflows import declared_times
from dejavu.workflows.auto import decided
from dejavu.workflows.preparation import cluster_model, declared, prepare
from dejavu.workflows.simulation_inputs import prepare as prepare_simulation

from harness.cluster_kit import configured
from harness.plans import made_up_spec

OPT = (
    "model=opt-66b",
    "model.compute=modelled",
    "profile=published",
    "cluster.devices_per_machine=2",
    "strategy=colocated",
    "strategy.stages=4",
    "workload=synthetic",
    "workload.num_requests=2",
)

WHOLE, QUARTER = StageShare(layers=1.0, weights=1.0), StageShare(layers=0.25, weights=0.25)


def opt_costs(*overrides: str) -> Costs:
    config = configured(*OPT, *overrides)
    return declared_times.times(
        config, declared_times.declared_shape(config.model), config.strategy.microbatch.token
    ).costs


def opt_spec(*overrides: str) -> ModelSpec:
    return cluster_model(configured(*OPT, *overrides), SilentProgress())


@pytest.mark.parametrize(
    "profile",
    [
        ("profile=published",),
        ("profile=roofline-a100",),
        ("profile=given", "profile.prompt_time_s=1", "profile.token_time_s=0.1"),
    ],
)
def test_the_tables_give_the_profiles_times(profile: tuple[str, ...]) -> None:
    costs, times = opt_costs(*profile), opt_spec(*profile).modelled
    assert times is not None
    for rows in (1, 3, 8):
        for tokens in (1, 37, 500, 1999):
            assert times.prompt_s(rows, tokens, 1.0) == pytest.approx(costs.prompt_time_s(rows, tokens), rel=0.005)
            assert times.step_s(rows, tokens, QUARTER) == pytest.approx(costs.step_time_s(rows, tokens) / 4, rel=0.005)


def test_the_time_scale_multiplies_and_prompts_bear_the_streaming_overhead_of_a_split() -> None:
    given = ("profile=given", "profile.prompt_time_s=2", "profile.token_time_s=0.1", "strategy.microbatch.token=8")
    split = ("strategy=disaggregated", "strategy.stages=1", "profile.streaming_overhead=1.5", "model.time_scale=0.1")
    times = opt_spec(*given, *split).modelled
    assert times is not None
    assert times.prompt_s(8, 100, 1.0) == pytest.approx(0.3)
    assert times.step_s(8, 100, WHOLE) == pytest.approx(0.01)
    together = opt_spec(*given, "profile.streaming_overhead=1.5").modelled
    assert together is not None
    assert together.prompt_s(8, 100, 1.0) == pytest.approx(2)


def test_heads_go_before_their_length_and_one_element_is_left() -> None:
    assert scaled_heads(72, 128, 1.0) == (72, 128)
    assert scaled_heads(72, 128, 1 / 4) == (18, 128)
    assert scaled_heads(72, 128, 1 / 64) == (1, 128)
    assert scaled_heads(8, 16, 1 / 16) == (1, 8)
    assert scaled_heads(2, 4, 0.01) == (1, 1)


def test_stages_hold_little_and_the_plan_says_what_the_model_itself_needs() -> None:
    plan = place(declared(configured(*OPT)), opt_spec(), epoch=Epoch(1))
    real = place(declared(configured(*OPT)), opt_spec("model.kv_scale=1"), epoch=Epoch(1))
    there = plan.place_of(plan.workers[0])
    assert there is not None
    assert stage_memory(plan, there) == stage_memory(real, there)
    assert plan.model.layout.row_bytes(64) * 72 == real.model.layout.row_bytes(64)
    said = json.loads(json.dumps(summary(plan)))
    assert said["rehearsal"]["kv_scale"] == pytest.approx(1 / 72)
    assert "distserve" in said["rehearsal"]["times"]


def test_a_plan_of_before_there_were_rehearsals_is_still_read() -> None:
    plan = place(declared(configured("model=tiny-llama", "strategy=colocated")), made_up_spec(), epoch=Epoch(1))
    raw = msgspec.to_builtins(plan)
    del raw["model"]["modelled"]
    assert msgspec.convert(raw, Plan, strict=False) == plan
    rehearsing = place(declared(configured(*OPT)), opt_spec(), epoch=Epoch(1))
    encoded = msgspec.json.encode(rehearsing)
    assert msgspec.json.decode(encoded, type=Plan) == rehearsing
    assert len(encoded) < 200_000


def test_memory_of_a_machine_is_that_of_its_devices_as_in_the_simulator() -> None:
    fits = (*OPT, "cluster.device_memory_gb=80", "strategy.microbatch.token=8")
    assert prepare(configured(*fits), SilentProgress()).plan.model.modelled is not None
    assert prepare_simulation(configured(*fits)).setting.plan.model.modelled is None
    too_small = (*OPT, "cluster.device_memory_gb=20")
    with pytest.raises(InfeasibleError, match="infeasible"):
        prepare(configured(*too_small), SilentProgress())
    with pytest.raises(InfeasibleError, match="infeasible"):
        prepare_simulation(configured(*too_small))


def test_prompts_of_a_model_without_a_tokenizer_are_lengths_with_tokens() -> None:
    prepared = prepare(configured(*OPT, "workload=lmsys-like", "workload.num_requests=3"), SilentProgress())
    assert prepared.codec is None
    assert len({request.prompt_tokens for request in prepared.requests}) == 3


def test_the_planner_decides_for_a_rehearsal_too(tmp_path: Path) -> None:
    auto = ("strategy=auto", "cluster.num_machines=4", "cluster.device_memory_gb=80", "strategy.stages=1")
    config, answer = decided(configured(*OPT, *auto), tmp_path, SilentProgress())
    assert answer is not None
    assert config.strategy.num_workers_needed <= 4
    assert cluster_model(config, SilentProgress()).modelled is not None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.time_scale=0.1",), "model.time_scale=0.1: is for a rehearsal; add model.compute=modelled"),
        (("model.kv_scale=0.5",), "model.kv_scale=0.5: is for a rehearsal"),
        (("model.compute=modelled", "model.time_scale=0"), "model.time_scale=0: must be from 0.001 to 1000"),
        (("model.compute=modelled", "model.time_scale=nan"), "must be from 0.001 to 1000"),
        (("model.compute=modelled", "model.kv_scale=1.5"), "model.kv_scale=1.5: must be more than 0 and at most 1"),
        (("model.compute=modelled", "model.kv_scale=0"), "must be more than 0 and at most 1"),
        (("model.compute=modelled", "workflow=profile"), ", and the choice is profile"),
        (("model.compute=modelled", "experiment=fig11"), ", and the choice is streaming"),
        (("model.compute=modelled", "cluster.device=cuda"), "cluster.device=cuda: a rehearsal waits"),
        (("model.compute=modelled", "profile=given"), "profile=given needs profile.prompt_time_s"),
        (("model.compute=modelled", "model=opt-66b"), "workload=chat is text, and model=opt-66b is sizes"),
        (("model=opt-66b",), "or rehearse with model.compute=modelled"),
    ],
)
def test_a_rehearsal_that_cannot_be_made_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        configured(*overrides)


def test_planning_and_simulating_take_the_same_declaration() -> None:
    for workflow in ("plan", "simulate"):
        configured(*OPT, "model.time_scale=0.5", f"workflow={workflow}")


def test_a_model_with_weights_is_rehearsed_with_its_own_tokens_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DEJAVU_CACHE", str(tmp_path))
    config = configured("model=tiny-llama", "model.compute=modelled")
    spec = cluster_model(config, SilentProgress())
    assert spec.modelled is not None
    assert spec.kv_scale == pytest.approx(spec.num_kv_heads * spec.head_dim / 64)
    real = made_up_spec()
    costs = opt_costs()
    times = rehearsed(real, costs, most_rows=300, overhead=1.0, time_scale=1.0, kv_scale=1.0).modelled
    assert times is not None
    assert times.step.rows[-1] == 300
    assert len(times.step.rows) < 50
