"""Whatever is simulated: time is conserved, and every token is made exactly once, also when workers die."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejavu.control.faults import AtStep, AtTime, Fault
from dejavu.control.placement import Declared, place
from dejavu.control.plan import Plan
from dejavu.errors import InfeasibleError
from dejavu.ids import Epoch, RequestId, WorkerName
from dejavu.planning.costs import GivenCosts
from dejavu.request import Request
from dejavu.sim.machinery import Machinery
from dejavu.sim.simulation import Setting, SimulationResult, simulate

from harness.plans import made_up_spec

NUM_LAYERS = 6


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    mode = draw(st.sampled_from(("colocated", "disaggregated")))
    token_depth = draw(st.integers(1, 4))
    declared = Declared(
        mode=mode,  # type: ignore[arg-type]
        prompt_depth=draw(st.integers(1, 3)),
        token_depth=token_depth,
        colocated_depth=token_depth,
        prompt_rows=draw(st.integers(1, 3)),
        prompt_tokens=draw(st.sampled_from((None, 24))),
        token_rows=draw(st.integers(1, 3)),
        in_flight=draw(st.sampled_from((None, 1, 3))),
        scheduling=draw(st.sampled_from(("row", "microbatch"))),  # type: ignore[arg-type]
        replication=draw(st.integers(0, token_depth - 1)),
        recovery=draw(st.sampled_from(("replica", "recompute", "restart"))),  # type: ignore[arg-type]
        num_standby=draw(st.integers(0, 2)),
    )
    return place(declared, made_up_spec(num_layers=NUM_LAYERS), epoch=Epoch(1))


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    sizes = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.floats(0, 5)), min_size=1, max_size=14))
    return [
        Request(id=RequestId(f"r{number}"), prompt_tokens=(0,) * prompt, max_tokens=new, arrival_s=at_s)
        for number, (prompt, new, at_s) in enumerate(sizes)
    ]


MACHINERY = st.builds(
    Machinery,
    streaming_overhead=st.sampled_from((1.0, 1.25)),
    link_bytes_per_s=st.sampled_from((None, 2e4, 1e6)),
    pcie_bytes_per_s=st.sampled_from((None, 2e4)),
    is_swapping=st.booleans(),
    hop_s=st.sampled_from((0.0, 0.001)),
)
COSTS = st.builds(
    GivenCosts,
    rows=st.just(2),
    whole_prompt_time_s=st.sampled_from((0.0, 0.4)),
    whole_token_time_s=st.sampled_from((0.01, 0.1)),
)


@st.composite
def kills(draw: st.DrawFn) -> list[Fault]:
    triggers = st.one_of(
        st.builds(AtTime, at_s=st.floats(0, 8)),
        st.builds(AtStep, microbatch=st.just(0), step=st.integers(1, 12)),
    )
    workers = st.integers(0, 8).map(lambda number: WorkerName(f"w{number}"))
    return draw(st.lists(st.builds(Fault, kind=st.just("kill"), worker=workers, trigger=triggers), max_size=4))


def check(result: SimulationResult, asked: list[Request]) -> None:
    assert [one.id for one in result.requests] == [request.id for request in asked]
    # A token that is lost, doubled or foreign is refused on arrival; here, that each answer is whole.
    assert [one.tokens for one in result.requests] == [request.max_tokens for request in asked]
    for one in result.requests:
        assert one.arrival_s <= one.first_token_s <= one.end_s <= result.makespan_s
    for name, times in result.workers.items():
        assert times.total_busy_s + times.idle_s == pytest.approx(result.makespan_s, abs=1e-9), name
        assert times.idle_s >= -1e-9, name


@settings(max_examples=120, deadline=None)
@given(plans(), requests(), MACHINERY, COSTS, st.integers(1, 3))
def test_time_is_conserved_and_every_token_is_made_once(
    plan: Plan, asked: list[Request], machinery: Machinery, costs: GivenCosts, replicas: int
) -> None:
    check(simulate(Setting(plan=plan, replicas=replicas, costs=costs, machinery=machinery), asked), asked)


@settings(max_examples=200, deadline=None)
@given(plans(), requests(), MACHINERY, COSTS, kills(), st.booleans(), st.integers(1, 2))
def test_time_is_conserved_and_every_token_is_made_once_when_workers_die(
    plan: Plan,
    asked: list[Request],
    machinery: Machinery,
    costs: GivenCosts,
    faults: list[Fault],
    may_grow: bool,
    replicas: int,
) -> None:
    setting = Setting(plan=plan, replicas=replicas, costs=costs, machinery=machinery, faults=faults, may_grow=may_grow)
    try:
        result = simulate(setting, asked)
    except InfeasibleError:
        assert not may_grow
        return
    check(result, asked)
    for repair in result.repairs:
        if repair.fenced_s is not None and repair.formed_s is not None:
            assert repair.failed_s <= repair.fenced_s <= repair.formed_s


@settings(max_examples=60, deadline=None)
@given(plans(), requests(), MACHINERY, COSTS, kills())
def test_the_same_setting_gives_the_same_run(
    plan: Plan, asked: list[Request], machinery: Machinery, costs: GivenCosts, faults: list[Fault]
) -> None:
    setting = Setting(plan=plan, costs=costs, machinery=machinery, faults=faults)

    assert simulate(setting, asked) == simulate(setting, asked)


@settings(max_examples=60, deadline=None)
@given(plans(), requests(), COSTS)
def test_work_that_no_death_cut_short_is_the_same_on_every_stage_of_a_pipeline(
    plan: Plan, asked: list[Request], costs: GivenCosts
) -> None:
    """Prompts by layers, steps by weights: over its part of them, each stage was busy for as long as the others."""
    result = simulate(Setting(plan=plan, costs=costs), asked)

    for pipeline in plan.pipelines:
        for kind in ("prompt", "step"):
            whole_s = []
            for stage in pipeline.stages:
                share = plan.model.share(stage.layers)
                part = share.layers if kind == "prompt" else share.weights
                whole_s.append(result.workers[stage.worker].busy_s.get(kind, 0.0) / part)
            assert whole_s == pytest.approx([whole_s[0]] * len(whole_s))


def test_a_plan_out_of_the_store_gives_the_same_run() -> None:
    plan = place(
        Declared(mode="colocated", colocated_depth=2, prompt_rows=2, token_rows=2, scheduling="row"),
        made_up_spec(),
        epoch=Epoch(1),
    )
    costs = GivenCosts(rows=2, whole_prompt_time_s=0.4, whole_token_time_s=0.02)
    asked = [Request(id=RequestId("a"), prompt_tokens=(0, 0), max_tokens=3)]
    again = msgspec.json.decode(msgspec.json.encode(plan), type=Plan)

    assert simulate(Setting(plan=plan, costs=costs), asked) == simulate(Setting(plan=again, costs=costs), asked)
