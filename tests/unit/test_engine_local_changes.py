"""A strategy that changes while requests are under way: none is dropped, and every token is the right one."""

from __future__ import annotations

import random

import pytest
import torch

from dejavu.control.placement import Declared
from dejavu.ids import RequestId
from dejavu.request import Completion, Request, Sampling

from harness.local_cluster import local_cluster
from harness.oracle import Oracle, random_prompt


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle.of("llama", tmp_path_factory.mktemp("models"))


def colocated(**others: object) -> Declared:
    values = {"prompt_rows": 2, "token_rows": 2, "in_flight": 2, "scheduling": "row", "timeout_s": 30.0, **others}
    return Declared(mode="colocated", colocated_depth=2, **values)  # type: ignore[arg-type]


def split(**others: object) -> Declared:
    values = {"prompt_rows": 2, "token_rows": 2, "in_flight": 2, "scheduling": "row", "timeout_s": 30.0, **others}
    return Declared(mode="disaggregated", prompt_depth=1, token_depth=2, **values)  # type: ignore[arg-type]


def requests_of(num_requests: int, **others: object) -> list[Request]:
    chooser = random.Random(num_requests)
    return [
        Request(
            id=RequestId(f"r{index}"),
            prompt_tokens=random_prompt(chooser, chooser.randint(1, 18)),
            max_tokens=chooser.randint(9, 14),
            **{"ignore_eos": True, **others},  # type: ignore[arg-type]
        )
        for index in range(num_requests)
    ]


def tokens_of(completions: dict[str, Completion]) -> dict[str, tuple[int, ...]]:
    return {request_id: completion.tokens for request_id, completion in completions.items()}


CASES = {
    "more microbatches": (colocated(), {"in_flight": 4}, 4),
    "fewer microbatches": (colocated(), {"in_flight": 1}, 2),
    "larger microbatches": (colocated(), {"microbatch_token": 5}, 4),
    "smaller microbatches": (colocated(in_flight=3), {"microbatch_token": 1}, 3),
    "as many rows in other microbatches": (colocated(), {"in_flight": 4, "microbatch_token": 1}, 4),
    "a split, more": (split(), {"in_flight": 3, "microbatch_token": 3, "microbatch_prompt": 4}, 4),
    "a split, less": (split(), {"in_flight": 1, "microbatch_prompt_tokens": 8}, 2),
    "microbatches replaced whole": (split(scheduling="microbatch"), {"in_flight": 1}, 2),
    "rows that are swapped": (colocated(swapping=True, in_flight=3), {"in_flight": 2, "microbatch_token": 1}, 2),
    "another level and tier": (split(), {"streaming": "naive", "recovery": "recompute"}, 4),
    "a memory stage": (colocated(stream_to="memory"), {"in_flight": 3}, 4),
}


FEW = ("fewer microbatches", "as many rows in other microbatches", "a split, more", "rows that are swapped")
"""Those of the default run."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in FEW else [pytest.mark.grid]) for case in CASES]
)
def test_open_rows_move_to_the_new_microbatches_and_those_without_a_place_wait_with_their_tokens(
    llama: Oracle, case: str
) -> None:
    declared, wanted, most_moved = CASES[case]
    requests = requests_of(9)
    with local_cluster(declared, llama.spec) as cluster:
        cluster.at_step(0, 4, lambda: cluster.change(**wanted))
        lines = cluster.serve(requests)
        assert tokens_of(lines) == llama.all_tokens(requests)
        assert all(row.in_place for rows in cluster.held().values() for row in rows)
        assert (cluster.plan.epoch, cluster.plan.revision) == (2, 2)
    (receipt,) = cluster.receipts
    assert 0 < sum(receipt.rows.values()) <= most_moved
    assert {line.resumed for line in lines.values()} == {0}


def test_sampled_rows_that_have_moved_draw_the_same_tokens_through_many_changes(llama: Oracle) -> None:
    requests = requests_of(8, sampling=Sampling(temperature=0.9, top_k=12, seed=7))
    with local_cluster(colocated(), llama.spec) as cluster:
        for step, in_flight in ((2, 1), (5, 3), (8, 2), (11, 4), (14, 1)):
            cluster.at_step(0, step, lambda in_flight=in_flight: cluster.change(in_flight=in_flight))
        lines = cluster.serve(requests)
        assert tokens_of(lines) == llama.all_tokens(requests)
        assert len(cluster.receipts) >= 4
    assert {line.finish_reason for line in lines.values()} == {"length"}


def test_replication_that_was_switched_on_has_copied_the_open_rows_and_restores_them(llama: Oracle) -> None:
    requests = requests_of(4)
    with local_cluster(colocated(), llama.spec) as cluster:
        cluster.at_step(0, 3, lambda: cluster.change(replication=1, copy_steps=1))
        cluster.at_step(1, 8, lambda: cluster.fail("w1"))
        lines = cluster.serve(requests)
        assert tokens_of(lines) == llama.all_tokens(requests)
    changed, repaired = cluster.receipts
    assert changed.bytes_replicated > 0
    assert (changed.bytes_restored, changed.rows, repaired.rows) == (0, {"replica": 4}, {"replica": 4})
    assert {line.resumed for line in lines.values()} == {1}


def test_a_standby_that_was_asked_for_takes_a_dead_workers_place_also_with_more_rows_than_it_made_room_for(
    llama: Oracle,
) -> None:
    requests = requests_of(6)
    with local_cluster(colocated(), llama.spec) as cluster:
        cluster.at_step(0, 2, lambda: cluster.change(standby=1))
        cluster.at_step(0, 5, lambda: cluster.change(in_flight=3, replication=1))
        cluster.at_step(0, 9, lambda: cluster.fail("w0"))
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)
        assert cluster.plan.workers == ("w2", "w1")
        assert cluster.plan.standby == ()


@pytest.mark.parametrize("phase", ["replace", "restore"])
def test_a_worker_that_dies_while_rows_move_costs_no_token_and_is_told_of(llama: Oracle, phase: str) -> None:
    requests = requests_of(7)
    with local_cluster(colocated(replication=1), llama.spec) as cluster:
        cluster.at_step(0, 4, lambda: cluster.change(in_flight=3, microbatch_token=1))
        cluster.at_phase(phase, lambda: cluster.fail("w1"))
        lines = cluster.serve(requests)
        assert tokens_of(lines) == llama.all_tokens(requests)
        # Those that had a row by then.
        assert 1 in {line.resumed for line in lines.values()}
        assert cluster.plan.token_pipeline.num_rows == 3
