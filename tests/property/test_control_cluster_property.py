"""Controller, admission and ring under any order of events: nothing is lost, doubled, early, or shared."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from dejavu.control.plan import Plan
from dejavu.ids import RequestId
from dejavu.request import Request

from harness.plans import EOS, VOCAB_SIZE, colocated_plan, split_plan
from harness.simulated_cluster import Faults, SimulatedCluster, right_tokens

small = st.integers(1, 3)
schedulings = st.sampled_from(["row", "microbatch"])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    rows = {
        "prompt_rows": draw(st.integers(1, 4)),
        "token_rows": draw(st.integers(1, 4)),
        "in_flight": draw(small),
        "scheduling": draw(schedulings),
    }
    if draw(st.booleans()):
        return colocated_plan(draw(small), **rows)
    return split_plan(draw(small), draw(small), **rows)


def made_requests(num_requests: int, seed: int) -> list[Request]:
    """Distinct prompts; some requests ignore EOS, some have a stop string, some arrive late."""
    chooser = random.Random(seed)
    return [
        Request(
            id=RequestId(f"r{index}"),
            # The first token tells requests apart.
            prompt_tokens=(index, *(chooser.randrange(VOCAB_SIZE) for _ in range(chooser.randint(0, 12)))),
            max_tokens=chooser.choice([1, 1, 2, 3, 7, 15]),
            ignore_eos=chooser.random() < 0.5,
            stop=(chr(ord("A") + chooser.randrange(VOCAB_SIZE)),) if chooser.random() < 0.4 else (),
            arrival_s=chooser.choice([0.0, 0.0, 0.0, 5.0]),
        )
        for index in range(num_requests)
    ]


@settings(deadline=None, max_examples=150)
@given(plan=plans(), num_requests=st.integers(0, 24), seed=st.integers(0, 2**20))
def test_every_request_ends_once_with_its_tokens_and_every_place_is_free_again(
    plan: Plan, num_requests: int, seed: int
) -> None:
    requests = made_requests(num_requests, seed)
    cluster = SimulatedCluster(plan, seed, Faults())
    completions = cluster.serve(requests)
    assert {request_id: line.tokens for request_id, line in completions.items()} == {
        request.id: right_tokens(request, (EOS,)) for request in requests
    }
    assert all(line.finish_reason in ("stop", "length") for line in completions.values())
    check_at_rest(cluster)


@settings(deadline=None, max_examples=250)
@given(
    plan=plans(),
    num_requests=st.integers(1, 24),
    seed=st.integers(0, 2**20),
    faults=st.sampled_from(
        [
            Faults(prompt_fails=0.3),
            Faults(kv_lost=0.1),
            Faults(kv_spoilt=0.15),
            Faults(prompt_fails=0.15, kv_lost=0.05, kv_spoilt=0.1),
            Faults(kv_spoilt=1.0),
            Faults(prompt_fails=1.0),
        ]
    ),
)
def test_faults_cost_attempts_or_the_request_but_never_a_wrong_token_or_a_place(
    plan: Plan, num_requests: int, seed: int, faults: Faults
) -> None:
    requests = made_requests(num_requests, seed)
    cluster = SimulatedCluster(plan, seed, faults)
    completions = cluster.serve(requests)
    assert set(completions) == {request.id for request in requests}
    for request in requests:
        line = completions[request.id]
        if line.finish_reason == "error":
            assert line.error
            assert request.id in cluster.faulted
        else:
            assert line.tokens == right_tokens(request, (EOS,))
    check_at_rest(cluster)


@settings(deadline=None, max_examples=250)
@given(
    plan=plans(),
    num_requests=st.integers(1, 24),
    seed=st.integers(0, 2**20),
    cancels=st.sampled_from([0.1, 0.3, 0.8]),
    faults=st.sampled_from([Faults(), Faults(prompt_fails=0.15, kv_lost=0.05, kv_spoilt=0.1)]),
)
def test_requests_given_up_at_any_moment_end_once_and_cost_the_others_nothing(
    plan: Plan, num_requests: int, seed: int, cancels: float, faults: Faults
) -> None:
    requests = made_requests(num_requests, seed)
    cluster = SimulatedCluster(plan, seed, faults)
    completions = cluster.serve(requests, cancels=cancels)
    assert set(completions) == {request.id for request in requests}
    for request in requests:
        line, right = completions[request.id], right_tokens(request, (EOS,))
        if line.finish_reason in ("stop", "length"):
            assert line.tokens == right
        else:
            assert line.finish_reason == "abort" or request.id in cluster.faulted
            assert line.tokens == right[: len(line.tokens)]
    check_at_rest(cluster)


def check_at_rest(cluster: SimulatedCluster) -> None:
    """Controller and ring hold nothing any more."""
    assert cluster.ring.num_live == 0
    assert cluster.ring.num_pending == 0
    assert not cluster.ring._ready, "readiness of rows that are gone is kept for ever"
    ledger = cluster.controller._ledger
    assert (ledger.num_open, ledger.admission.num_waiting, ledger.admission.num_rows_taken) == (0, 0, 0)
    kept = (ledger.rows, ledger._given_back, ledger._leaving, ledger.admission._known, ledger.admission._queue._alone)
    assert not any(kept), "something of requests that have ended is kept for ever"
    assert all(row.is_gone for row in cluster.rows.values())
