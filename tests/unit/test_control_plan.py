"""From a declaration to a plan: layers, places, peers, memory, and the form that people read."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejavu.control.ending import Limits, ending
from dejavu.control.layers import balanced_layers, explicit_layers
from dejavu.control.member import Member, decode_member, encode_json
from dejavu.control.memory import stage_memory
from dejavu.control.placement import Declared, place
from dejavu.control.plan import Plan, Scheduling
from dejavu.control.summary import summary
from dejavu.errors import ConfigError, InfeasibleError
from dejavu.ids import Epoch, IncarnationId, WorkerName
from dejavu.kv.layout import LayerRange

from harness.plans import colocated_plan, made_up_spec, split_plan

W0, W1, W2, W3 = (WorkerName(f"w{index}") for index in range(4))


def declare(**values: object) -> Declared:
    defaults = {"mode": "disaggregated", "prompt_rows": 2, "token_rows": 2, "scheduling": "row"}
    return Declared(**{**defaults, **values})  # type: ignore[arg-type]


@given(depth=st.integers(1, 12), more=st.integers(0, 40), last_extra=st.floats(0, 100))
def test_balanced_layers_cover_every_layer_once_in_order(depth: int, more: int, last_extra: float) -> None:
    ranges = balanced_layers(depth + more, depth, last_extra=last_extra)
    assert [layer for cut in ranges for layer in cut.indices] == list(range(depth + more))
    assert len(ranges) == depth


@given(depth=st.integers(1, 12), more=st.integers(0, 40))
def test_balanced_layers_differ_by_at_most_one_layer_without_a_head(depth: int, more: int) -> None:
    sizes = [len(cut) for cut in balanced_layers(depth + more, depth)]
    assert max(sizes) - min(sizes) <= 1


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    assert [len(cut) for cut in balanced_layers(12, 3, last_extra=3.0)] == [5, 5, 2]


@pytest.mark.parametrize(("depth", "words"), [(0, "at least 1 stage"), (7, "7 stages.*6 layers")])
def test_a_depth_that_the_model_cannot_have_is_refused_with_both_numbers(depth: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        balanced_layers(6, depth)


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ([[0, 6]], "2 stages.*1 ranges"),
        ([[0, 2], [3, 6]], r"range 1 is \[3, 6\].*\[2, b\]"),
        ([[0, 2], [2, 2]], "range 1"),
        ([[0, 2], [2, 5]], "ends at layer 5.*6 layers"),
        ([[0, 2, 3], [2, 6]], "range 0"),
    ],
)
def test_explicit_layers_with_a_fault_are_refused_naming_it(ranges: list[list[int]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        explicit_layers(ranges, 6, 2, "strategy.stages=2")


def test_explicit_layers_are_taken_as_they_are() -> None:
    declared = declare(prompt_depth=1, token_depth=2, token_layers=((0, 5), (5, 6)))
    plan = place(declared, made_up_spec(), epoch=Epoch(3))
    assert [stage.layers for stage in plan.token_pipeline.stages] == [LayerRange(0, 5), LayerRange(5, 6)]
    assert [stage.layers for stage in plan.prompt_pipeline.stages] == [LayerRange(0, 6)]


def test_a_split_numbers_its_workers_prompt_first() -> None:
    plan = split_plan(2, 2)
    assert plan.workers == (W0, W1, W2, W3)
    assert [stage.worker for stage in plan.token_pipeline.stages] == [W2, W3]
    assert (plan.prompt_pipeline.kind, plan.token_pipeline.kind) == ("prompt", "token")


def test_a_colocated_pipeline_is_prompt_and_token_pipeline_in_one() -> None:
    plan = colocated_plan(2)
    assert plan.prompt_pipeline is plan.token_pipeline
    assert plan.token_pipeline.in_flight == 2
    assert plan.token_pipeline.num_rows == 4


@pytest.mark.parametrize(
    ("scheduling", "in_flight", "expected"), [("row", None, 3), ("microbatch", None, 5), ("microbatch", 1, 1)]
)
def test_a_split_of_whole_microbatches_has_one_in_flight_for_every_stage(
    scheduling: Scheduling, in_flight: int | None, expected: int
) -> None:
    plan = split_plan(2, 3, scheduling=scheduling, in_flight=in_flight)
    assert plan.token_pipeline.in_flight == expected


def test_a_place_knows_its_neighbours() -> None:
    first, last = split_plan(2, 2).place_of(W2), split_plan(2, 2).place_of(W3)
    assert first is not None
    assert last is not None
    assert (first.is_first, first.is_last, first.next_worker) == (True, False, W3)
    assert (last.is_first, last.is_last, last.next_worker) == (False, True, None)
    assert split_plan().place_of(WorkerName("w9")) is None


def test_prompt_stages_send_to_the_next_and_to_every_owner_of_their_layers() -> None:
    plan = split_plan(2, 2)
    assert plan.peers_of(W0) == (W1, W2)
    assert plan.peers_of(W1) == (W3,)
    uneven = place(
        declare(prompt_depth=2, token_depth=2, token_layers=((0, 4), (4, 6))), made_up_spec(), epoch=Epoch(1)
    )
    assert uneven.peers_of(W1) == (W2, W3)


def test_token_stages_send_forward_to_stage_0_and_back_to_where_their_kv_comes_from() -> None:
    plan = split_plan(1, 3)
    assert [plan.peers_of(worker) for worker in (W1, W2, W3)] == [(W2, W0), (W3, W1, W0), (W1, W0)]


def test_colocated_stages_send_forward_and_to_stage_0_whether_a_restored_row_is_ready() -> None:
    plan = colocated_plan(3)
    assert [plan.peers_of(worker) for worker in plan.workers] == [(W1,), (W2, W0), (W0,)]
    assert colocated_plan(1).peers_of(W0) == ()
    assert plan.peers_of(WorkerName("w9")) == ()


def test_too_few_workers_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"need 3 workers, but cluster.num_workers=2"):
        place(declare(prompt_depth=1, token_depth=2, num_workers=2), made_up_spec(), epoch=Epoch(1))
    with pytest.raises(ConfigError, match=r"strategy.stages=2 need 2 workers"):
        place(declare(mode="colocated", colocated_depth=2, num_workers=1), made_up_spec(), epoch=Epoch(1))


def test_a_stage_that_does_not_fit_its_memory_is_infeasible_and_says_what_it_needs() -> None:
    spec = made_up_spec()
    plan = place(declare(), spec, epoch=Epoch(1))
    needs = max(
        stage_memory(plan, found).total_bytes for worker in plan.workers if (found := plan.place_of(worker)) is not None
    )
    place(declare(device_memory_bytes=needs), spec, epoch=Epoch(1))
    with pytest.raises(InfeasibleError, match=r"infeasible: (prompt|token) stage 0 .*MiB"):
        place(declare(device_memory_bytes=needs - 1), spec, epoch=Epoch(1))


def test_a_plan_survives_json() -> None:
    plan = split_plan(2, 3)
    assert msgspec.json.decode(encode_json(plan), type=Plan) == plan


def test_the_summary_is_json_with_every_stage_and_its_memory() -> None:
    said = json.loads(json.dumps(summary(split_plan(1, 2))))
    assert said["mode"] == "disaggregated"
    token = said["pipelines"][1]
    assert [stage["layers"] for stage in token["stages"]] == [[0, 3], [3, 6]]
    assert all(stage["predicted"]["kv_bytes"] > 0 for stage in token["stages"])
    assert said["microbatch"] == {"prompt": 2, "prompt_tokens": None, "token": 2}


def test_a_member_survives_json_and_leaves_out_what_it_has_not() -> None:
    member = Member(
        name=W0,
        incarnation=IncarnationId("x"),
        host="h",
        pid=1,
        address="127.0.0.1:1",
        device="cpu",
        memory_bytes=1,
        state="starting",
    )
    assert decode_member(encode_json(member)) == member
    assert b"problem" not in encode_json(member)


@pytest.mark.parametrize(
    ("token", "num_generated", "expected"), [(9, 1, "stop"), (9, 4, "stop"), (1, 4, "length"), (1, 3, None)]
)
def test_a_row_ends_at_eos_or_at_its_limit(token: int, num_generated: int, expected: str | None) -> None:
    assert ending(token, num_generated, Limits(max_tokens=4, eos_token_ids=(9,))) == expected


def test_eos_that_is_ignored_ends_nothing() -> None:
    assert ending(9, 1, Limits(max_tokens=4)) is None
