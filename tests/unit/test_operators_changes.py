"""A declared state that is changed in the store: taken up, refused, and followed to its end."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from dejavu.config import Config, StrategyMode
from dejavu.config.declared import declared_state, put_at
from dejavu.control.member import encode_json
from dejavu.control.memory import stage_memory
from dejavu.ids import WorkerName
from operators import changes, status
from operators.actions import DropChange, KillWorker, PutChange, StartWorker, TellFenced, TellFormed
from operators.observation import Observed
from operators.placement import revision_of

from harness.operator_world import World, with_standby
from harness.plans import colocated_plan

W0, W1, W2, W3 = (WorkerName(f"w{index}") for index in range(4))


def spec(revision: int = 1, **wanted: object) -> bytes:
    """Two colocated stages, and what else is wanted: ``in_flight=4``, ``microbatch_token=8``."""
    config = Config()
    config.strategy.mode, config.strategy.stages = StrategyMode.colocated, 2
    for key, value in wanted.items():
        put_at(config, "strategy." + key.replace("microbatch_", "microbatch."), value)
    state = declared_state(config)
    state.revision = revision
    return encode_json(state)


def world(**others: object) -> World:
    return World(colocated_plan(2), spec=spec(), **others)  # type: ignore[arg-type]


def asked(world: World, revision: int = 2, **wanted: object) -> World:
    """Somebody has put the wish into the store, and the operator has looked a few times."""
    world.spec = spec(revision, **wanted)
    world.looks(3)
    return world


def test_a_wish_becomes_a_plan_of_the_next_epoch_that_everybody_goes_over_to_with_nobody_dead() -> None:
    made = asked(world(), in_flight=4, microbatch_token=3)
    plan = made.state.plan
    assert (plan.epoch, plan.revision, plan.fenced) == (2, 2, ())
    assert (plan.token_pipeline.in_flight, plan.token_pipeline.microbatch_rows) == (4, 3)
    assert len(made.all_of(TellFenced)) == 1
    assert made.all_of(TellFormed) == []
    change = made.state.change
    assert change is not None
    assert change.differences == {"strategy.microbatch.token": (16, 3), "strategy.in_flight": (None, 4)}
    assert (change.phase, change.epoch, change.formed_s) == ("form", 2, None)
    made.serve()
    made.look(1.0)
    made.resume()
    made.look()
    (done,) = made.state.changes
    assert (done.phase, done.receipt is not None) == ("done", True)
    assert len(made.all_of(TellFormed)) == 1
    assert made.all_of(KillWorker) == made.all_of(StartWorker) == []
    assert made.state.journals == ()
    assert made.spec == spec(2, in_flight=4, microbatch_token=3)


def test_what_cannot_change_is_refused_by_name_with_the_reason_and_the_cluster_goes_on_as_it_was() -> None:
    for key, value, reason in (
        ("strategy.stages", 1, "strategy.stages=1: cannot change while the cluster runs: who computes which layers"),
        ("model.dtype", "bfloat16", 'model.dtype="bfloat16": cannot change while the cluster runs: the workers have'),
        ("cluster.host", "10.0.0.1", "cluster.host"),
        ("transport.timeout_s", 5.0, "transport.timeout_s"),
        ("strategy.may_grow", False, "strategy.may_grow"),
    ):
        made, wish = world(), msgspec.json.decode(spec(2, in_flight=4))
        *path, name = key.split(".")
        owner = wish
        for part in path:
            owner = owner[part]
        owner[name] = value
        made.spec = encode_json(wish)
        made.looks(3)
        (change,) = made.state.changes
        assert (change.phase, made.state.plan.epoch) == ("refused", 1)
        assert reason in (change.reason or "")
        # The revision is used up; what is declared is what runs.
        assert made.spec == spec(2)
        assert asked(made, 3, in_flight=4).state.plan.revision == 3


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"replication": 2}, "must be from 0 to 1"),
        ({"microbatch_token": 0}, "must be at least 1"),
        ({"in_flight": "four"}, "cannot be read"),
        ({"standby": -1}, "must be at least 0"),
        ({"streaming": "off"}, "streaming=off"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused(wanted: dict[str, object], reason: str) -> None:
    made = World(msgspec.structs.replace(colocated_plan(2), replication=1), spec=spec(replication=1))
    made = asked(made, **{"replication": 1, **wanted})
    assert (made.state.changes[0].phase, made.state.plan.epoch) == ("refused", 1)
    assert reason in (made.state.changes[0].reason or "")


def test_rows_that_do_not_fit_the_memory_are_refused_as_infeasible() -> None:
    made = world()
    made.rules = replace(made.rules, device_memory_bytes=1)
    (change,) = asked(made, microbatch_token=64).state.changes
    assert (change.phase, change.is_infeasible) == ("refused", True)


def test_rows_that_fit_only_without_their_former_places_are_refused_as_infeasible() -> None:
    made = world()
    place = made.state.plan.place_of(W0)
    assert place is not None
    need = stage_memory(made.state.plan, place)
    made.rules = replace(made.rules, device_memory_bytes=need.total_bytes + 1)
    (change,) = asked(made, microbatch_token=1).state.changes
    assert (change.phase, change.is_infeasible) == ("refused", True)
    assert "while rows move, w0 needs" in (change.reason or "")
    assert asked(made, 3, microbatch_prompt=1).state.plan.prompt_rows == 1


def test_more_standbys_are_started_and_those_that_are_wanted_no_longer_are_ended() -> None:
    made = asked(world(), standby=2)
    assert made.state.plan.standby == (W2, W3)
    assert [action.name for action in made.all_of(StartWorker)] == [W2, W3]
    made.serve()
    made.look()
    made.resume()
    made.done.clear()
    asked(made, 3, standby=1)
    assert [action.name for action in made.all_of(KillWorker)] == [W3]
    assert made.state.plan.standby == (W2,)


def test_no_standby_is_added_where_no_process_may_be_started() -> None:
    (change,) = asked(world(may_grow=False), standby=1).state.changes
    assert (change.phase, "strategy.may_grow=false" in (change.reason or "")) == ("refused", True)


def test_a_wish_waits_until_a_repair_is_done() -> None:
    made = world()
    made.kill(W1)
    made.spec = spec(2, in_flight=3)
    made.looks(3)
    assert (made.state.plan.epoch, made.state.changes) == (2, ())
    made.serve()
    made.look()
    made.resume()
    made.looks(3)
    assert (made.state.plan.epoch, made.state.plan.token_pipeline.in_flight) == (3, 3)


def test_a_worker_that_dies_on_the_way_is_replaced_in_the_changed_plan_and_the_change_is_done_with_the_repair() -> None:
    made = asked(world(), in_flight=3)
    made.kill(W1)
    journal = made.repaired()
    assert (journal.phase, made.state.plan.epoch, made.state.plan.token_pipeline.in_flight) == ("done", 3, 3)
    made.look()
    assert made.state.changes[0].phase == "done"


def test_a_worker_that_never_serves_in_the_changed_plan_is_replaced() -> None:
    made = asked(world(), in_flight=3)
    made.register(W0, "serving")
    made.looks(2, after_s=20.0)
    assert [failure.worker for failure in made.state.journals[-1].failures] == [W1]


def test_a_declared_state_of_an_old_or_no_revision_is_put_right() -> None:
    for value in (spec(1, in_flight=4), b"{}", b"no json"):
        made = world()
        made.spec = value
        made.looks(2)
        assert (made.spec, made.state.changes) == (spec(), ())
    assert (revision_of(None), revision_of(b"x"), revision_of(spec(7))) == (-1, -1, 7)


def test_nothing_that_differs_is_done_at_once_without_an_epoch() -> None:
    made = asked(world())
    assert (made.state.changes[0].phase, made.state.plan.epoch) == ("done", 1)


def test_a_change_is_in_the_store_the_log_and_the_conditions() -> None:
    made = asked(world(), in_flight=4)
    change = made.state.changes[0]
    observed = Observed(members=made.members, plan=made.plan, spec=made.spec, running=frozenset(), changes={0: b"old"})
    assert changes.decide(made.state.changes, observed) == (
        PutChange(revision=2, value=encode_json(change)),
        DropChange(revision=0),
    )
    assert changes.told(None, change) == "change 2: strategy.in_flight null → 4: epoch 2"
    assert changes.told(change, change) is None
    ready = status.conditions(made.state, observed, {}, 1.0)["Ready"]
    assert (ready.status, ready.reason) == (
        False,
        "change 2 of the declared state (strategy.in_flight null → 4): form",
    )


def test_standbys_keep_their_order_when_some_of_them_go() -> None:
    made = World(with_standby(colocated_plan(2), W2, W3), spec=spec(standby=2))
    asked(made, standby=1)
    assert made.state.plan.standby == (W2,)
