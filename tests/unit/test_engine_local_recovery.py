"""Whoever dies, and whenever: the tokens are those of a run without failure, and nothing is left behind."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from dejavu.control.placement import Declared
from dejavu.control.replan import shrunk
from dejavu.ids import RequestId
from dejavu.request import Completion, Request

from harness.deaths import Death, Deaths, prompt_done, step_done
from harness.local_cluster import LocalCluster, local_cluster
from harness.oracle import Oracle, ragged_requests, random_prompt

LAST_STEP = 11
MOST_REPLAYED = 4
"""Rows that would replay more steps are recomputed; see dejavu.control.recovery."""
MOMENTS = {
    "during the first prompt": (prompt_done, 1),
    "during the second prompt": (prompt_done, 2),
    "first step": (step_done(1), 1),
    "middle": (step_done(5), 2),
    "last step": (step_done(LAST_STEP), 1),
}
STEPS = ("first step", "middle", "last step")
EVERY_DEATH = [
    *(("colocated", *death) for death in itertools.product(("w0", "w1", "w2"), MOMENTS, (0, 1, 2))),
    *(("split", "w0", moment, k) for moment, k in itertools.product(tuple(MOMENTS)[:2], (0, 1))),
    *(("split", *death) for death in itertools.product(("w1", "w2"), STEPS, (0, 1))),
]
ALWAYS = ("during the first prompt", "middle")
"""Moments at which every number of copies is tried by default; at the others one copy, and the rest in the grid."""


def death_case(kind: str, worker: str, moment: str, replication: int) -> object:
    is_extra = moment not in ALWAYS and replication != 1
    return pytest.param(kind, worker, moment, replication, marks=[pytest.mark.grid] * is_extra)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle.of("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def four_rows(llama: Oracle) -> tuple[list[Request], dict[str, tuple[int, ...]]]:
    """Requests that fill every place of the shapes below for as long as they live; and their tokens."""
    chooser = random.Random(4)
    requests = [
        Request(
            id=RequestId(f"r{index}"),
            prompt_tokens=random_prompt(chooser, length),
            max_tokens=limit,
            ignore_eos=True,
        )
        for index, (length, limit) in enumerate([(3, 12), (17, 9), (8, 12), (1, 10)])
    ]
    return requests, llama.all_tokens(requests)


def shape(kind: str, replication: int, **others: object) -> Declared:
    """Three workers and two microbatches of two rows: ``colocated``, or ``split`` into 1 prompt and 2 token stages."""
    values = {"prompt_rows": 2, "token_rows": 2, "in_flight": 2, "scheduling": "row", "timeout_s": 30.0, **others}
    if kind == "split":
        values |= {"prompt_depth": 1, "token_depth": 2}
    mode = "colocated" if kind == "colocated" else "disaggregated"
    return Declared(mode=mode, colocated_depth=3, replication=replication, **values)  # type: ignore[arg-type]


def tokens_of(completions: dict[str, Completion]) -> dict[str, tuple[int, ...]]:
    return {request_id: completion.tokens for request_id, completion in completions.items()}


def assert_nothing_is_left(cluster: LocalCluster) -> None:
    """No worker holds a row that has ended, and no chunk came that was bad or found no room."""
    counters = cluster.counters()
    if cluster.plan.is_replicated or cluster.plan.mode == "disaggregated":
        assert {worker: rows for worker, rows in cluster.held().items() if rows} == {}
    for worker in counters.values():
        assert (worker.kv.get("corrupt", 0), worker.kv.get("refused", 0)) == (0, 0)


@pytest.mark.parametrize(("kind", "worker", "moment", "replication"), [death_case(*death) for death in EVERY_DEATH])
def test_tokens_are_those_of_a_run_without_failure(
    llama: Oracle, four_rows: tuple[list[Request], dict[str, tuple[int, ...]]],
    kind: str, worker: str, moment: str, replication: int,
) -> None:  # fmt: skip
    requests, expected = four_rows
    matches, count = MOMENTS[moment]
    tap = Deaths(Death(worker, matches, count))
    with local_cluster(shape(kind, replication), llama.spec, tap=tap) as cluster:
        completions = cluster.serve(requests)
        assert tap.are_over
        assert tokens_of(completions) == expected
        (receipt,) = cluster.receipts
        assert_nothing_is_left(cluster)
    assert sum(line.resumed for line in completions.values()) == sum(receipt.rows.values()) > 0
    if replication == 0 and worker != "w0":
        assert "replica" not in receipt.rows
    if replication and moment in ("middle", "last step"):
        assert set(receipt.rows) == {"replica"}
        assert max(receipt.steps_recomputed.values()) <= MOST_REPLAYED
        assert receipt.bytes_restored > 0


@pytest.mark.parametrize("worker", ["w0", "w1", "w2"])
def test_a_standby_takes_the_place_with_its_part_of_the_model(
    llama: Oracle, four_rows: tuple[list[Request], dict[str, tuple[int, ...]]], worker: str
) -> None:
    requests, expected = four_rows
    tap = Deaths(Death(worker, step_done(4)))
    with local_cluster(shape("colocated", 1, num_standby=1), llama.spec, tap=tap) as cluster:
        assert tokens_of(cluster.serve(requests)) == expected
        assert (set(cluster.plan.workers), cluster.plan.standby) == ({"w0", "w1", "w2", "w3"} - {worker}, ())
        kept = next(one for one in cluster.workers if one.name == "w3").kept
        assert kept.model is not None
        assert kept.whole is not None
        assert_nothing_is_left(cluster)
    assert cluster.receipts[0].rows == {"replica": 4}


@pytest.mark.parametrize("replication", [0, 1])
@pytest.mark.parametrize(("kind", "worker"), [*itertools.product(("colocated", "split"), ("w0", "w1", "w2"))])
def test_layers_are_cut_anew_onto_the_survivors_when_the_cluster_may_not_grow(
    llama: Oracle, four_rows: tuple[list[Request], dict[str, tuple[int, ...]]],
    kind: str, worker: str, replication: int,
) -> None:  # fmt: skip
    requests, expected = four_rows
    matches = prompt_done if (kind, worker) == ("split", "w0") else step_done(4)
    tap = Deaths(Death(worker, matches))
    with local_cluster(shape(kind, replication), llama.spec, tap=tap, policy=shrunk) as cluster:
        assert tokens_of(cluster.serve(requests)) == expected
        assert set(cluster.plan.workers) == {"w0", "w1", "w2"} - {worker}
        assert_nothing_is_left(cluster)
        assert all(not one.kept.former for one in cluster.workers), "sources of the last restore are let go"
    if (kind, replication) == ("colocated", 1):
        assert cluster.receipts[0].rows == {"replica": 4}


def test_one_worker_is_left_of_a_split_pair_and_goes_on_alone(llama: Oracle) -> None:
    requests = ragged_requests(5, seed=2)
    declared = Declared(
        mode="disaggregated", prompt_rows=2, token_rows=2, in_flight=2, scheduling="row", timeout_s=30.0
    )
    with local_cluster(declared, llama.spec, tap=Deaths(Death("w1", step_done(2))), policy=shrunk) as cluster:
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)
        assert (cluster.plan.mode, cluster.plan.workers) == ("colocated", ("w0",))


@pytest.mark.parametrize("recovery", ["restart", "recompute"])
@pytest.mark.parametrize("kind", ["colocated", "split"])
def test_a_tier_that_is_chosen_is_the_one_that_is_used(
    llama: Oracle, four_rows: tuple[list[Request], dict[str, tuple[int, ...]]], kind: str, recovery: str
) -> None:
    requests, expected = four_rows
    tap = Deaths(Death("w1", step_done(5)))
    with local_cluster(shape(kind, 1, recovery=recovery), llama.spec, tap=tap) as cluster:
        assert tokens_of(cluster.serve(requests)) == expected
        assert_nothing_is_left(cluster)
    (receipt,) = cluster.receipts
    assert receipt.rows == {recovery: 4}
    assert receipt.bytes_restored == 0
    if recovery == "restart":
        assert max(receipt.steps_recomputed.values()) == 5


@pytest.mark.parametrize("scheduling", ["row", "microbatch"])
@pytest.mark.parametrize("seed", range(3))
def test_places_that_are_used_again_survive_one_death_after_the_other(
    llama: Oracle, tmp_path: Path, scheduling: str, seed: int
) -> None:
    chooser = random.Random(seed)
    requests = ragged_requests(14, seed=seed)
    deaths = [
        Death(chooser.choice(("w0", "w1", "w2")), step_done(step), chooser.randint(1, 2)) for step in (2, 5, 8, 11, 15)
    ]
    with local_cluster(shape("colocated", 1, scheduling=scheduling), llama.spec, tap=Deaths(*deaths)) as cluster:
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)
        assert_nothing_is_left(cluster)
    assert cluster.plan.epoch > 3
