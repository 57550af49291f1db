"""Streaming at every level, to the token stages, to a memory stage and to disk: tokens and copies are exact."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch

from dejavu.control.placement import Declared
from dejavu.control.plan import StreamTarget
from dejavu.engine.compute import prompt_ids
from dejavu.engine.fetching import MOST_FETCHES
from dejavu.engine.messages import CONTROL, ReleaseRows, RunPrompt, decode
from dejavu.ids import RequestId, RowId, WorkerName
from dejavu.kv.disk_row import read_row
from dejavu.kv.layout import LayerRange
from dejavu.kv.levels import StreamingLevel
from dejavu.kv.route import Holding
from dejavu.request import Completion, Request

from harness.local_cluster import CLUSTER, local_cluster
from harness.oracle import Oracle, ragged_requests

ATOL, RTOL = 2e-4, 1e-3
LEVELS = list(StreamingLevel)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle.of("llama", tmp_path_factory.mktemp("models"))


def colocated(depth: int, stream_to: StreamTarget | None, level: StreamingLevel = StreamingLevel.full) -> Declared:
    return Declared(
        mode="colocated",
        colocated_depth=depth,
        prompt_rows=2,
        token_rows=3,
        scheduling="row",
        timeout_s=30.0,
        stream_to=stream_to,
        streaming=level,
    )


def disaggregated(stream_to: StreamTarget | None, level: StreamingLevel) -> Declared:
    shape = colocated(1, stream_to, level)
    return dataclasses.replace(shape, mode="disaggregated", prompt_depth=2, token_depth=2)


class Watch:
    """A tap that knows which row got which prompt, and keeps copies alive after their rows have ended."""

    def __init__(self) -> None:
        self._row_ids: dict[tuple[int, ...], RowId] = {}

    def row_of(self, request: Request) -> RowId:
        return self._row_ids[request.prompt_tokens]

    def __call__(self, sender: str, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        if header[:1] != CONTROL:
            return self.kv(peer, header, payload)
        message = decode(header)
        if isinstance(message, RunPrompt):
            ids = prompt_ids(memoryview(payload), len(message.rows), torch.device("cpu")).tolist()
            for row, padded in zip(message.rows, ids, strict=True):
                self._row_ids[tuple(padded[: row.length])] = row.row_id
        return [] if isinstance(message, ReleaseRows) else [(header, payload)]

    def kv(self, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        return [(header, payload)]


class Spoilt(Watch):
    """Spoils the chosen KV messages to one peer, counted from 0."""

    def __init__(self, peer: str, chosen: frozenset[int] | range) -> None:
        super().__init__()
        self._peer, self._chosen, self._num_seen = peer, chosen, 0

    def kv(self, peer: str, header: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        if peer == self._peer:
            self._num_seen += 1
            if self._num_seen - 1 in self._chosen:
                return [(header, bytes(byte ^ 1 for byte in payload))]
        return [(header, payload)]


def written(request: Request, completion: Completion) -> list[int]:
    """The tokens that have cells: the last one has none."""
    return [*request.prompt_tokens, *completion.tokens][:-1]


@pytest.mark.parametrize("level", LEVELS[1:], ids=lambda level: level.value)
def test_a_handoff_gives_the_same_tokens_at_every_level(llama: Oracle, level: StreamingLevel) -> None:
    requests = ragged_requests(7, seed=3)
    with local_cluster(disaggregated(None, level), llama.spec) as cluster:
        completions = cluster.serve(requests)
        counters = cluster.counters()
    assert {id_: line.tokens for id_, line in completions.items()} == llama.all_tokens(requests)
    assert counters["w0"].stream_bytes > 0
    assert (counters["w0"].stream_exposed_s > 0) or level is not StreamingLevel.naive


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.value)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_memory_stage_holds_every_position_of_every_row_at_every_level(
    llama: Oracle, depth: int, level: StreamingLevel
) -> None:
    requests, tap = ragged_requests(7, seed=4), Watch()
    with local_cluster(colocated(depth, "memory", level), llama.spec, tap=tap) as cluster:
        completions = cluster.serve(requests)
        assert {id_: line.tokens for id_, line in completions.items()} == llama.all_tokens(requests)
        if level is StreamingLevel.off:
            assert all(worker.stream_bytes == 0 for worker in cluster.counters().values())
            return
        for request in requests:
            ids = written(request, completions[request.id])
            found = cluster.copy(tap.row_of(request), len(ids))
            torch.testing.assert_close(found, llama.cells(ids), atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("level", [StreamingLevel.naive, StreamingLevel.full], ids=lambda level: level.value)
def test_token_stages_send_prompts_that_came_by_handoff_and_steps_on_to_a_memory_stage(
    llama: Oracle, level: StreamingLevel
) -> None:
    (request,), tap = ragged_requests(1, seed=5), Watch()
    with local_cluster(disaggregated("memory", level), llama.spec, tap=tap) as cluster:
        ids = written(request, cluster.serve([request])[request.id])
        torch.testing.assert_close(cluster.copy(tap.row_of(request), len(ids)), llama.cells(ids), atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("level", LEVELS[1:], ids=lambda level: level.value)
def test_copies_on_disk_can_be_read_back_when_the_cluster_is_gone(
    llama: Oracle, tmp_path: Path, level: StreamingLevel
) -> None:
    requests, tap = ragged_requests(4, seed=6), Watch()
    shape, spec = colocated(2, "disk", level), llama.spec
    with local_cluster(shape, spec, tap=tap, kv_folder=tmp_path) as cluster:
        completions = cluster.serve(requests)
        stages = cluster.plan.token_pipeline.stages
    for request in requests:
        ids = written(request, completions[request.id])
        parts = []
        for stage in stages:
            row = read_row(tmp_path / stage.worker, tap.row_of(request), cluster=CLUSTER)
            holding = Holding(owner=stage.worker, layers=stage.layers, heads=(0, spec.num_kv_heads))
            parts.append(row.landed(spec.layout, holding, len(ids)).cells_LCHTD)
        torch.testing.assert_close(torch.cat(parts), llama.cells(ids), atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("stream_to", ["memory", "disk"])
def test_copies_are_let_go_when_their_rows_have_ended(llama: Oracle, tmp_path: Path, stream_to: StreamTarget) -> None:
    shape = colocated(2, stream_to)
    with local_cluster(shape, llama.spec, kv_folder=tmp_path) as cluster:
        cluster.serve(ragged_requests(9, seed=7))
        counters = cluster.counters()
        if stream_to == "memory":
            worker = cluster.workers[-1]
            assert worker.kept.replicas.held() == ()
            assert counters[worker.node.name].kv.get("corrupt", 0) == 0
    assert list(tmp_path.glob("*/*.kv")) == []


def test_levels_can_be_switched_between_batches(llama: Oracle) -> None:
    requests = ragged_requests(3, seed=8)
    expected = llama.all_tokens(requests)
    sent = []
    with local_cluster(colocated(1, "memory"), llama.spec) as cluster:
        for round_, level in enumerate(LEVELS):
            cluster.set_streaming(level)
            renamed = [msgspec.structs.replace(request, id=RequestId(f"{request.id}-{round_}")) for request in requests]
            completions = cluster.serve(renamed)
            assert [completions[one.id].tokens for one in renamed] == [expected[request.id] for request in requests]
            sent.append(cluster.counters()["w0"].stream_bytes)
    assert sent[0] == 0
    per_level = [after - before for before, after in pairwise(sent)]
    assert len(set(per_level)) == 1, "every level but off moves the same bytes"


def test_a_bad_chunk_of_a_handoff_is_fetched_again_and_no_prompt_is_computed_twice(llama: Oracle) -> None:
    requests = ragged_requests(5, seed=9)
    tap = Spoilt("w2", frozenset({0, 3}))
    with local_cluster(disaggregated(None, StreamingLevel.full), llama.spec, tap=tap) as cluster:
        completions = cluster.serve(requests)
        counters = cluster.counters()
    assert {id_: line.tokens for id_, line in completions.items()} == llama.all_tokens(requests)
    assert counters["w2"].kv["asked_again"] == counters["w2"].kv["corrupt"] > 0
    assert counters["w0"].prompts == 3, "five rows in microbatches of two"


def test_a_bad_chunk_of_a_copy_is_fetched_again_and_the_copy_becomes_whole(llama: Oracle) -> None:
    (request,), tap = ragged_requests(1, seed=10, longest=9), Spoilt("w1", frozenset({1, 6, 7}))
    with local_cluster(colocated(1, "memory"), llama.spec, tap=tap) as cluster:
        ids = written(request, cluster.serve([request])[request.id])
        torch.testing.assert_close(cluster.copy(tap.row_of(request), len(ids)), llama.cells(ids), atol=ATOL, rtol=RTOL)
        assert cluster.counters()["w1"].kv["asked_again"] >= 1


def test_a_copy_that_never_comes_whole_is_given_up_and_costs_no_token(llama: Oracle) -> None:
    requests = ragged_requests(2, seed=11)
    with local_cluster(colocated(1, "memory"), llama.spec, tap=Spoilt("w1", range(10_000))) as cluster:
        completions = cluster.serve(requests)
        counters = cluster.counters()
    assert {id_: line.tokens for id_, line in completions.items()} == llama.all_tokens(requests)
    assert 0 < counters["w1"].kv["asked_again"] <= len(requests) * MOST_FETCHES
    assert counters["w1"].kv.get("accepted", 0) == 0


def test_a_memory_stage_has_its_place_in_the_plan(llama: Oracle) -> None:
    with local_cluster(colocated(2, "memory"), llama.spec) as cluster:
        plan = cluster.plan
    (stage,) = plan.memory_stages
    assert (stage.worker, stage.layers) == (WorkerName("w2"), LayerRange(0, llama.spec.num_layers))
    assert plan.peers_of(WorkerName("w2")) == (WorkerName("w0"), WorkerName("w1"))
    assert WorkerName("w2") in plan.peers_of(WorkerName("w0"))
