"""How a cluster stands, out of its keys, and the tables that tell it."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console

from dejavu.config import Config, StoreConfig, StoreKind, WorkflowName, WorkloadConfig, validate
from dejavu.control.journal import Failure, RepairJournal, RestoreReceipt
from dejavu.control.member import Member, MemberState, encode_json
from dejavu.control.plan import Fenced
from dejavu.control.standing import clusters_of, standing, state_in
from dejavu.errors import ConfigError
from dejavu.ids import Epoch, IncarnationId, WorkerName
from dejavu.report.status_table import render_status
from dejavu.store.keys import Keys

from harness.plans import split_plan

KEYS = Keys("c")
PLAN = split_plan(prompt=1, token=2)


def member(name: str, state: MemberState = "serving", problem: str | None = None) -> Member:
    return Member(
        name=WorkerName(name),
        incarnation=IncarnationId("i"),
        host="here",
        pid=7,
        address="127.0.0.1:5",
        device="cpu",
        memory_bytes=8_000_000_000,
        state=state,
        epoch=Epoch(1),
        problem=problem,
    )


JOURNAL = RepairJournal(
    number=1,
    epoch=Epoch(1),
    failures=(
        Failure(
            worker=WorkerName("w1"), incarnation=None, cause="exit", reason="was killed", seen_s=11.0, since_s=10.9
        ),
    ),
    how={WorkerName("w1"): "process"},
    phase="done",
    fenced_s=11.1,
    replaced_s=12.0,
    receipt=RestoreReceipt(restored_s=12.1, resumed_s=12.2, rows={"replica": 2}),
)


def values(**changes: bytes) -> dict[str, bytes]:
    w0, w1, _ = PLAN.workers
    conditions = {"Ready": {"status": False, "reason": "no worker w2", "since_s": 90.0}}
    made = {
        KEYS.plan: encode_json(PLAN),
        KEYS.controller: encode_json({"incarnation": "x", "host": "here", "pid": 3, "address": "127.0.0.1:4"}),
        KEYS.status: encode_json(conditions),
        KEYS.worker(w0): encode_json(member(w0)),
        KEYS.worker(w1): encode_json(member(w1, "ready", problem="no room left")),
        KEYS.worker("stranger"): encode_json(member("stranger", "starting")),
        KEYS.acks("token", 1): b'{"0":17,"1":16}',
        KEYS.repairs(1): encode_json(JOURNAL),
        KEYS.spec: b"{}",
    }
    return {**made, **{getattr(KEYS, name): value for name, value in changes.items()}}


def shown(cluster_values: dict[str, bytes]) -> str:
    console = Console(file=io.StringIO(), width=160)
    render_status(console, standing(KEYS, cluster_values), now_s=100.0)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_every_place_of_the_plan_has_its_worker_and_what_is_not_registered_is_absent() -> None:
    status = standing(KEYS, values())
    stages = [
        (pipeline.kind, stage.stage, stage.worker.state) for pipeline in status.pipelines for stage in pipeline.stages
    ]
    assert stages == [("prompt", 0, "serving"), ("token", 0, "ready"), ("token", 1, "absent")]
    assert [worker.name for worker in status.others] == ["stranger"]
    assert status.pipelines[1].stages[1].copied == {"0": 17, "1": 16}
    assert status.unreadable == {}


def test_a_worker_that_was_declared_dead_or_that_serves_in_an_older_epoch_is_told_so() -> None:
    w0, w1, _ = PLAN.workers
    fenced = (Fenced(worker=w1, incarnation=IncarnationId("i")),)
    newer = msgspec.structs.replace(PLAN, epoch=Epoch(2), fenced=fenced)
    assert state_in(newer, member(w0)) == "joining"
    assert state_in(newer, member(w1)) == "dead"
    assert state_in(newer, None) == "absent"
    assert state_in(None, member(w0)) == "serving"


def test_a_value_that_is_none_of_ours_is_told_and_the_rest_is_read() -> None:
    status = standing(KEYS, values(plan=b"{", controller=b'"nobody"'))
    assert set(status.unreadable) == {KEYS.plan, KEYS.controller}
    assert status.pipelines == ()
    assert len(status.others) == 3
    assert len(status.repairs) == 1


def test_the_tables_tell_conditions_stages_problems_and_repairs() -> None:
    text = shown(values())
    for words in (
        "c: epoch 1, disaggregated",
        "no: no worker w2 (for 10.0 s)",
        "0:17 1:16",
        "no room left",
        "w1 was killed, a new process took its place; pause 1.30 s",
        "absent",
        "no place",
    ):
        assert words in text


def test_a_cluster_of_which_only_the_controller_is_left_can_be_shown() -> None:
    text = shown({KEYS.controller: values()[KEYS.controller]})
    assert "no plan yet" in text
    assert "process 3" in text
    assert "controller  none" in shown({KEYS.plan: encode_json(PLAN)})


def test_the_status_is_json_without_objects_of_ours() -> None:
    decoded = json.loads(encode_json(standing(KEYS, values())))
    assert decoded["pipelines"][0]["stages"][0]["layers"] == [0, 6]
    assert decoded["repairs"][0]["failures"][0]["worker"] == "w1"


def test_clusters_are_named_once_and_keys_of_others_are_none() -> None:
    assert clusters_of(["/dejavu/b/plan", "/dejavu/a/workers/w0", "/dejavu/a/plan", "/other/x/y"]) == ["a", "b"]


def test_a_look_at_a_store_of_ones_own_is_refused() -> None:
    config = Config(workload=WorkloadConfig(max_tokens=8))
    config.workflow.name = WorkflowName.status
    with pytest.raises(ConfigError, match="store=external"):
        validate(config)
    config.store = StoreConfig(kind=StoreKind.external, endpoints=["127.0.0.1:2379"])
    validate(config)
