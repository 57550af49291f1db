"""The plan after a death, by example: the same places with others, or fewer places."""

from __future__ import annotations

import msgspec
import pytest

from dejavu.control.memory import Limits
from dejavu.control.placement import Declared, place
from dejavu.control.plan import Fenced, Pipeline, Plan, StreamTarget
from dejavu.control.replan import replaced, shrunk
from dejavu.errors import InfeasibleError, InvalidTransition
from dejavu.ids import Epoch, IncarnationId, WorkerName
from dejavu.kv.layout import LayerRange

from harness.plans import colocated_plan, made_up_spec, split_plan

W0, W1, W2, W3, W4, W5 = (WorkerName(f"w{index}") for index in range(6))
OLD = IncarnationId("old")


def plan_of(depth: int | tuple[int, int], **values: object) -> Plan:
    """Colocated for one number, disaggregated for two."""
    plan = colocated_plan(depth) if isinstance(depth, int) else split_plan(*depth)
    return msgspec.structs.replace(plan, **values)


def with_memory(stream_to: StreamTarget | None = "memory") -> Plan:
    """Stages w0 and w1, and w2 that holds copies of both."""
    declared = Declared(
        mode="colocated", colocated_depth=2, prompt_rows=2, token_rows=2, scheduling="row", stream_to=stream_to
    )
    return place(declared, made_up_spec(), epoch=Epoch(1))


def names(pipeline: Pipeline) -> list[str]:
    return [stage.worker for stage in pipeline.stages]


def test_a_new_process_of_the_same_name_takes_its_own_place() -> None:
    plan = plan_of(3)
    after = replaced(plan, {W1: OLD}, {W1: W1})
    assert after == msgspec.structs.replace(plan, epoch=Epoch(2), fenced=(Fenced(worker=W1, incarnation=OLD),))


def test_a_standby_takes_the_dead_ones_place_and_leaves_the_list() -> None:
    plan = plan_of((1, 2), standby=(W3, W4))
    after = replaced(plan, {W2: OLD}, {W2: W3})
    assert names(after.token_pipeline) == [W1, W3]
    assert [stage.layers for stage in after.token_pipeline.stages] == [
        stage.layers for stage in plan.token_pipeline.stages
    ]
    assert after.standby == (W4,)


def test_every_place_of_a_ring_can_change_hands_at_once() -> None:
    after = replaced(plan_of(2, standby=(W2,)), {W0: None, W1: None}, {W0: W2, W1: W1})
    assert names(after.token_pipeline) == [W2, W1]
    assert after.standby == ()


def test_a_dead_standby_stays_listed_and_its_incarnation_is_fenced() -> None:
    after = replaced(plan_of(2, standby=(W2,)), {W2: OLD}, {W2: W2})
    assert after.standby == (W2,)
    assert after.fenced == (Fenced(worker=W2, incarnation=OLD),)


def test_a_replacement_for_nobody_is_only_a_new_epoch() -> None:
    plan = plan_of(2)
    assert replaced(plan, {}, {}) == msgspec.structs.replace(plan, epoch=Epoch(2))


def test_the_newest_64_incarnations_stay_fenced_each_once() -> None:
    plan = plan_of(1)
    for number in range(70):
        plan = replaced(plan, {W0: IncarnationId(f"i{number}")}, {W0: W0})
    plan = replaced(plan, {W0: IncarnationId("i69")}, {W0: W0})
    assert [one.incarnation for one in plan.fenced] == [f"i{number}" for number in range(6, 70)]


@pytest.mark.parametrize(
    ("dead", "by", "words"),
    [
        ({W1: None}, {}, "nobody replaces w1"),
        ({W1: None}, {W1: W0}, "w0 would have two places"),
        ({W0: None, W1: None}, {W0: W3, W1: W3}, "w3 would have two places"),
        ({}, {W1: W3}, "w1 would be replaced without being dead"),
    ],
)
def test_a_replacement_that_does_not_add_up_is_refused_naming_the_worker(
    dead: dict[WorkerName, None], by: dict[WorkerName, WorkerName], words: str
) -> None:
    with pytest.raises(InvalidTransition, match=words):
        replaced(plan_of(2, standby=(W3,)), dead, by)


@pytest.mark.parametrize(
    ("dead", "left"),
    [((W0,), [W1, W2]), ((W1,), [W0, W2]), ((W2,), [W0, W1]), ((W0, W2), [W1])],
)
def test_survivors_keep_their_order_and_share_all_layers(dead: tuple[WorkerName, ...], left: list[str]) -> None:
    plan = plan_of(3, replication=2)
    after = shrunk(plan, dict.fromkeys(dead, OLD))
    pipeline = after.token_pipeline
    assert (after.epoch, after.mode, names(pipeline)) == (2, "colocated", left)
    assert [layer for stage in pipeline.stages for layer in stage.layers.indices] == list(range(6))
    assert [stage.index for stage in pipeline.stages] == list(range(len(left)))
    assert after.replication == len(left) - 1
    assert after.fenced == tuple(Fenced(worker=worker, incarnation=OLD) for worker in dead)


def test_rows_keep_their_places_when_the_pipeline_gets_shorter() -> None:
    plan = plan_of(3)
    pipeline = shrunk(plan, {W1: None}).token_pipeline
    assert (pipeline.in_flight, pipeline.microbatch_rows) == (3, 2)


def test_the_head_counts_when_layers_are_cut_anew() -> None:
    heavy = made_up_spec(num_layers=12, head_parameters=3000)
    plan = plan_of((1, 4), model=heavy)
    cuts = [len(stage.layers) for stage in shrunk(plan, {W4: None}).token_pipeline.stages]
    declared = Declared(mode="disaggregated", token_depth=3, prompt_rows=2, token_rows=2, scheduling="row")
    fresh = place(declared, heavy, epoch=Epoch(1))
    assert cuts == [len(stage.layers) for stage in fresh.token_pipeline.stages] == [5, 5, 2]


def test_a_pipeline_that_lost_nobody_keeps_its_own_layers() -> None:
    declared = Declared(
        mode="disaggregated",
        prompt_depth=2,
        prompt_layers=((0, 5), (5, 6)),
        token_depth=2,
        prompt_rows=2,
        token_rows=2,
        scheduling="row",
    )
    after = shrunk(place(declared, made_up_spec(), epoch=Epoch(1)), {W3: None})
    assert [stage.layers for stage in after.prompt_pipeline.stages] == [LayerRange(0, 5), LayerRange(5, 6)]
    assert [stage.layers for stage in after.token_pipeline.stages] == [LayerRange(0, 6)]


@pytest.mark.parametrize(
    ("depths", "dead", "prompt", "token"),
    [
        ((1, 3), (W0,), [W3], [W1, W2]),
        ((3, 1), (W3,), [W0, W1], [W2]),
        ((2, 2), (W2, W3), [W0], [W1]),
        ((2, 3), (W0, W1, W3), [W4], [W2]),
    ],
)
def test_a_pipeline_that_lost_all_takes_the_last_stage_of_the_other(
    depths: tuple[int, int], dead: tuple[WorkerName, ...], prompt: list[str], token: list[str]
) -> None:
    after = shrunk(plan_of(depths), dict.fromkeys(dead))
    assert after.mode == "disaggregated"
    assert names(after.prompt_pipeline) == prompt
    assert names(after.token_pipeline) == token


@pytest.mark.parametrize(("dead", "left"), [((W0,), W1), ((W1,), W0)])
def test_the_last_of_a_disaggregated_cluster_becomes_colocated_with_the_token_sides_rows(
    dead: tuple[WorkerName, ...], left: WorkerName
) -> None:
    plan = msgspec.structs.replace(split_plan(1, 1, token_rows=3, in_flight=4), replication=0)
    after = shrunk(plan, dict.fromkeys(dead))
    (pipeline,) = after.pipelines
    assert (after.mode, pipeline.kind, names(pipeline)) == ("colocated", "colocated", [left])
    assert (pipeline.in_flight, pipeline.microbatch_rows) == (4, 3)
    assert after.prompt_pipeline is after.token_pipeline
    assert pipeline.stages[0].layers == LayerRange(0, 6)


def test_a_standby_takes_the_place_and_nothing_is_cut_anew() -> None:
    plan = plan_of(3, standby=(W3, W4), replication=2)
    after = shrunk(plan, {W1: None})
    assert after == replaced(plan, {W1: None}, {W1: W3})


def test_a_standby_too_few_goes_to_the_stage_that_keeps_rows() -> None:
    after = shrunk(plan_of((2, 2), standby=(W4,)), {W1: None, W3: None})
    assert names(after.prompt_pipeline) == [W0]
    assert names(after.token_pipeline) == [W2, W4]
    assert after.standby == ()


def test_a_standby_goes_first_to_a_pipeline_that_lost_all() -> None:
    after = shrunk(plan_of((1, 2), standby=(W3,)), {W0: None, W1: None})
    assert names(after.prompt_pipeline) == [W3]
    assert names(after.token_pipeline) == [W2]


def test_a_dead_standby_takes_no_place_and_is_listed_no_more() -> None:
    after = shrunk(plan_of(2, standby=(W2, W3)), {W1: None, W2: OLD})
    assert names(after.token_pipeline) == [W0, W3]
    assert after.standby == ()
    assert after.fenced == (Fenced(worker=W2, incarnation=OLD),)


def test_a_memory_stage_that_died_is_given_up_with_what_was_streamed_to_it() -> None:
    after = shrunk(with_memory(), {W2: None})
    assert after.memory_stages == ()
    assert after.stream_to is None
    assert names(after.token_pipeline) == [W0, W1]


def test_a_memory_stage_that_lives_keeps_its_place_when_layers_are_cut_anew() -> None:
    after = shrunk(with_memory(), {W1: None})
    assert [stage.worker for stage in after.memory_stages] == [W2]
    assert after.stream_to == "memory"
    assert names(after.token_pipeline) == [W0]


def test_a_standby_that_no_computing_stage_needs_takes_the_memory_stages_place() -> None:
    after = shrunk(msgspec.structs.replace(with_memory(), standby=(W3,)), {W2: None})
    assert [stage.worker for stage in after.memory_stages] == [W3]
    assert after.stream_to == "memory"


def test_streaming_to_disk_outlives_a_shorter_pipeline() -> None:
    assert shrunk(with_memory("disk"), {W1: None}).stream_to == "disk"


@pytest.mark.parametrize(
    ("plan", "dead"),
    [
        (plan_of(2), (W0, W1)),
        (plan_of((1, 1)), (W0, W1)),
        (plan_of(2, standby=(W2,)), (W0, W1, W2)),
        (with_memory(), (W0, W1)),
    ],
)
def test_a_cluster_in_which_nobody_who_computes_lives_is_infeasible(plan: Plan, dead: tuple[WorkerName, ...]) -> None:
    with pytest.raises(InfeasibleError, match="all 2 workers that compute in epoch 1 are dead, and 0 standbys live"):
        shrunk(plan, dict.fromkeys(dead))


def test_survivors_too_small_for_the_model_are_refused_with_the_bytes() -> None:
    plan = plan_of(3)
    need = 2 * 3 * plan.model.layout.row_bytes(6)
    assert shrunk(plan, {W1: None, W2: None}, limits=Limits(device_bytes=2 * need)).token_pipeline.depth == 1
    with pytest.raises(InfeasibleError, match=r"stage 0 \(layers \[0, 6\)\) needs .* MiB"):
        shrunk(plan, {W1: None, W2: None}, limits=Limits(device_bytes=need))


def test_deaths_one_after_the_other_end_where_they_would_have_ended_together() -> None:
    plan = plan_of((2, 3), replication=2)
    one_by_one = shrunk(shrunk(plan, {W2: OLD}), {W0: OLD})
    together = shrunk(plan, {W2: OLD, W0: OLD})
    assert one_by_one.pipelines == together.pipelines
    assert one_by_one.epoch == together.epoch + 1
