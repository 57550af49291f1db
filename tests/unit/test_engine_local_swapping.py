"""A cluster that swaps gives the tokens of the whole model, however long copies take and whoever dies."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dejavu.control.placement import Declared
from dejavu.ids import RequestId
from dejavu.kv import swapper
from dejavu.kv.device import CpuCopier
from dejavu.kv.pool import KvPool
from dejavu.kv.slot_cells import SlotCopy
from dejavu.models.spec import describe
from dejavu.request import Completion, Request

from harness.local_cluster import LocalCluster, local_cluster
from harness.oracle import Oracle, ragged_requests, random_prompt
from harness.poisoned import PoisonedCopies

FAMILIES = ("gpt2", "opt", "bloom", "llama", "qwen3")
SHAPES = {
    "colocated 1": {"mode": "colocated", "colocated_depth": 1, "in_flight": 3},
    "colocated 2": {"mode": "colocated", "colocated_depth": 2, "in_flight": 4},
    "colocated 3": {"mode": "colocated", "colocated_depth": 3},
    "split 1 + 2": {"mode": "disaggregated", "prompt_depth": 1, "token_depth": 2, "in_flight": 4},
    "split 2 + 3": {"mode": "disaggregated", "prompt_depth": 2, "token_depth": 3, "in_flight": 3},
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapper, "SlotCopies", PoisonedCopies)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Oracle:
    return Oracle.of("llama", folder)


def swapping(shape: str, **others: object) -> Declared:
    values = {"prompt_rows": 2, "token_rows": 2, "scheduling": "row", "timeout_s": 30.0, "swapping": True}
    return Declared(**{**values, **SHAPES[shape], **others})  # type: ignore[arg-type]


def tokens_of(completions: dict[str, Completion]) -> dict[str, tuple[int, ...]]:
    return {request_id: completion.tokens for request_id, completion in completions.items()}


def test_rows_refilled_while_their_microbatch_is_out_have_the_tokens_of_the_reference(llama: Oracle) -> None:
    requests = ragged_requests(17, seed=21)
    with local_cluster(swapping("split 1 + 2"), llama.spec) as cluster:
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)
        swaps = [one.swap for one in cluster.counters().values() if one.pipeline == "token"]
    assert all(one.bytes_in > 0 and one.bytes_out > 0 and one.steps > 0 for one in swaps)


def test_a_colocated_pipeline_that_swaps_equals_the_reference(llama: Oracle) -> None:
    requests = ragged_requests(13, seed=22)
    with local_cluster(swapping("colocated 2"), llama.spec) as cluster:
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)


def test_room_for_one_microbatch_alone_still_makes_progress(llama: Oracle) -> None:
    requests = ragged_requests(5, seed=23)
    with local_cluster(swapping("colocated 2", in_flight=1, token_rows=1), llama.spec) as cluster:
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)


def test_half_precision_has_the_same_tokens_in_slots_and_in_place(llama: Oracle) -> None:
    requests = ragged_requests(9, seed=26)
    spec = describe(Path(llama.spec.folder), "float16")
    served = []
    for swaps in (True, False):
        # Which rows meet in a larger batch is chance, and so is how numbers of 16 bits are rounded in it.
        declared = swapping("colocated 2", prompt_rows=1, token_rows=1, in_flight=4, swapping=swaps)
        with local_cluster(declared, spec) as cluster:
            served.append(tokens_of(cluster.serve(requests)))
    assert served[0] == served[1]


def equal_requests(count: int, length: int, new: int) -> list[Request]:
    chooser = random.Random(5)
    return [
        Request(
            id=RequestId(f"r{index}"), prompt_tokens=random_prompt(chooser, length), max_tokens=new, ignore_eos=True
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(("in_flight", "brought_at_each_step"), [(2, False), (4, True)])
def test_bytes_are_valid_cells_in_and_new_cells_out_to_the_byte(
    llama: Oracle, in_flight: int, brought_at_each_step: bool
) -> None:
    rows, length, new = 2, 9, 6
    requests = equal_requests(rows * in_flight, length, new)
    declared = swapping("colocated 2", in_flight=in_flight, scheduling="microbatch")
    with local_cluster(declared, llama.spec) as cluster:
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)
        counters = cluster.counters()
    for stage, worker in zip(cluster.plan.token_pipeline.stages, cluster.plan.workers, strict=True):
        cell_bytes = len(stage.layers) * cluster.plan.model.layout.position_bytes
        swap = counters[worker].swap
        # The first token comes from the prompt.
        steps = range(length, length + new - 1)
        assert swap.steps == in_flight * len(steps)
        assert swap.bytes_out == len(requests) * (length + len(steps)) * cell_bytes
        cells_in = sum(steps) if brought_at_each_step else length
        assert swap.bytes_in - swap.unused_bytes == len(requests) * cells_in * cell_bytes


@pytest.mark.parametrize("kind", ["colocated 3", "split 1 + 2"])
@pytest.mark.parametrize(("way", "number"), [("in", 5), ("out", 4)])
def test_a_stage_that_dies_in_the_middle_of_a_swap_costs_no_token(
    llama: Oracle, monkeypatch: pytest.MonkeyPatch, kind: str, way: str, number: int
) -> None:
    requests = ragged_requests(12, seed=24)
    with local_cluster(swapping(kind, replication=1), llama.spec) as cluster:
        (layers,) = (stage.layers for stage in cluster.plan.token_pipeline.stages if stage.worker == "w1")
        copies = itertools.count(1)

        def die_half_way(host: KvPool, copy: SlotCopy) -> None:
            if (host.layers, copy.way) == (layers, way) and next(copies) == number:
                cluster.fail("w1")

        monkeypatch.setattr(PoisonedCopies, "on_copy", staticmethod(die_half_way))
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)
        assert len(cluster.receipts) == 1


def test_a_bus_that_is_slower_than_the_steps_is_told_once_per_stage_and_changes_no_token(
    llama: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    requests = equal_requests(6, 9, 24)
    declared = swapping("colocated 1", scheduling="microbatch", bus_bytes_per_s=3e6)
    with local_cluster(declared, llama.spec) as cluster:
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)
        (swap,) = (one.swap for one in cluster.counters().values())
    assert swap.waits > swap.steps / 2
    told = [record.message for record in caplog.records if "swapping takes longer than computing" in record.message]
    assert len(told) == 1
    assert "64 steps waited for their KV" in told[0]


class Background(CpuCopier):
    """As on a CUDA device, new cells go out beside the computation."""

    gathers_at_once = False


@pytest.mark.parametrize("replication", [0, 1])
def test_new_cells_that_go_out_in_the_background_reach_host_and_successors(
    llama: Oracle, monkeypatch: pytest.MonkeyPatch, replication: int
) -> None:
    monkeypatch.setattr("dejavu.engine.swapping.copier_for", lambda device: Background())
    requests = ragged_requests(12, seed=25)
    with local_cluster(swapping("split 1 + 2", replication=replication), llama.spec) as cluster:
        if replication:
            cluster.at_step(1, 3, lambda: cluster.fail("w1"))
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)


def test_an_inspected_row_has_its_newest_cell_in_the_host_store(llama: Oracle) -> None:
    (request,) = equal_requests(1, 7, 5)
    seen: list[torch.Tensor] = []

    def inspect(cluster: LocalCluster) -> None:
        seen.append(cluster.cells(0, 0, 8))

    with local_cluster(swapping("colocated 2"), llama.spec) as cluster:
        cluster.at_step(0, 2, lambda: inspect(cluster))
        cluster.serve([request])
        plain = cluster.cells(0, 0, 8)
    assert torch.equal(seen[0], plain)
    assert bool((plain.abs() < 1e3).all())


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["colocated 3", "split 1 + 2"])
@pytest.mark.parametrize("worker", ["w0", "w1", "w2"])
@pytest.mark.parametrize("step", [1, 2, 5, 8])
@pytest.mark.parametrize("replication", [0, 1])
def test_whoever_dies_at_whatever_step_the_tokens_are_right(
    llama: Oracle, kind: str, worker: str, step: int, replication: int
) -> None:
    """Field report B20."""
    requests = equal_requests(8, 9, 12)
    with local_cluster(swapping(kind, replication=replication), llama.spec) as cluster:
        cluster.at_step(1, step, lambda: cluster.fail(worker))
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)
        assert len(cluster.receipts) == 1


@pytest.mark.grid
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheduling", ["row", "microbatch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_combination_equals_the_reference(
    folder: Path, family: str, shape: str, scheduling: str, dtype: str
) -> None:
    oracle = Oracle.of(family, folder)
    requests = ragged_requests(11, seed=31)
    spec = describe(Path(oracle.spec.folder), dtype)
    # Numbers of 16 bits are rounded in another way in batches of another size, and which rows meet is chance.
    rows = {} if dtype == "float32" else {"prompt_rows": 1, "token_rows": 1}
    declared = swapping(shape, scheduling=scheduling, **rows)
    with local_cluster(declared, spec) as cluster:
        swapped = tokens_of(cluster.serve(requests))
    if dtype == "float32":
        assert swapped == oracle.all_tokens(requests)
    with local_cluster(replace(declared, swapping=False), spec) as cluster:
        assert tokens_of(cluster.serve(requests)) == swapped
