"""Engines, controller and DejaVuLib together in one process give the tokens that the whole model gives alone."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch

from dejavu.control.placement import Declared
from dejavu.ids import RequestId
from dejavu.request import Completion, Request, Sampling

from harness.local_cluster import local_cluster
from harness.oracle import Oracle, ragged_requests, random_prompt

FAMILIES = ("gpt2", "bloom", "llama", "qwen3")
SPLITS = ((1, 1), (2, 1), (1, 3), (3, 2))
SCHEDULINGS = ("row", "microbatch")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Oracle:
    return Oracle.of("llama", folder)


def split(prompt: int, token: int, **others: object) -> Declared:
    """A disaggregated declaration with few rows, so that they are used again."""
    values = {"prompt_rows": 2, "token_rows": 2, "scheduling": "row", "timeout_s": 30.0, **others}
    return Declared(mode="disaggregated", prompt_depth=prompt, token_depth=token, **values)  # type: ignore[arg-type]


def colocated(depth: int, **others: object) -> Declared:
    """A colocated declaration with few rows, so that they are used again."""
    values = {"prompt_rows": 3, "token_rows": 2, "scheduling": "row", "timeout_s": 30.0, **others}
    return Declared(mode="colocated", colocated_depth=depth, **values)  # type: ignore[arg-type]


def tokens_of(completions: dict[str, Completion]) -> dict[str, tuple[int, ...]]:
    return {request_id: completion.tokens for request_id, completion in completions.items()}


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
@pytest.mark.parametrize("depths", SPLITS, ids=str)
def test_ragged_prompts_on_every_split_equal_the_reference(
    llama: Oracle, depths: tuple[int, int], scheduling: str
) -> None:
    requests = ragged_requests(11, seed=depths[0] * 10 + depths[1])
    with local_cluster(split(*depths, scheduling=scheduling), llama.spec) as cluster:
        completions = cluster.serve(requests)
    assert tokens_of(completions) == llama.all_tokens(requests)
    assert {completion.finish_reason for completion in completions.values()} <= {"length", "stop"}


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_ragged_prompts_on_a_colocated_pipeline_equal_the_reference(llama: Oracle, depth: int, scheduling: str) -> None:
    requests = ragged_requests(11, seed=depth)
    with local_cluster(colocated(depth, scheduling=scheduling), llama.spec) as cluster:
        completions = cluster.serve(requests)
    assert tokens_of(completions) == llama.all_tokens(requests)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_on_unequal_pipelines_equals_the_reference(folder: Path, family: str) -> None:
    oracle = Oracle.of(family, folder)
    requests = ragged_requests(7, seed=3)
    with local_cluster(split(2, 3), oracle.spec) as cluster:
        assert tokens_of(cluster.serve(requests)) == oracle.all_tokens(requests)


def test_uneven_explicit_layers_equal_the_reference(llama: Oracle) -> None:
    requests = ragged_requests(8, seed=5)
    declared = split(2, 2, prompt_layers=((0, 1), (1, 5)), token_layers=((0, 4), (4, 5)))
    with local_cluster(declared, llama.spec) as cluster:
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)


def test_more_microbatches_than_stages_equal_the_reference(llama: Oracle) -> None:
    requests = ragged_requests(14, seed=6)
    with local_cluster(split(1, 2, token_rows=1, prompt_rows=3, in_flight=5), llama.spec) as cluster:
        assert tokens_of(cluster.serve(requests)) == llama.all_tokens(requests)


def test_a_cluster_serves_a_second_workload_after_the_first(llama: Oracle) -> None:
    first, both = ragged_requests(5, seed=7), ragged_requests(11, seed=7)
    second = both[5:]
    with local_cluster(split(1, 2), llama.spec) as cluster:
        cluster.serve(first)
        assert tokens_of(cluster.serve(second)) == llama.all_tokens(second)


@pytest.mark.parametrize("declared", [split(2, 2), colocated(2)], ids=["split", "colocated"])
def test_one_token_requests_run_no_step(llama: Oracle, declared: Declared) -> None:
    requests = [msgspec.structs.replace(request, max_tokens=1) for request in ragged_requests(9, seed=9)]
    with local_cluster(declared, llama.spec) as cluster:
        completions = cluster.serve(requests)
        counters = cluster.counters()
    assert tokens_of(completions) == llama.all_tokens(requests)
    assert {completion.finish_reason for completion in completions.values()} == {"length"}
    assert sum(counter.steps for counter in counters.values()) == 0


@pytest.mark.parametrize("declared", [split(1, 2), colocated(2)], ids=["split", "colocated"])
def test_eos_as_first_token_runs_no_step(llama: Oracle, declared: Declared) -> None:
    """Field report B04."""
    request = Request(id=RequestId("r"), prompt_tokens=random_prompt(random.Random(1), 12), max_tokens=8)
    first = llama.tokens(request)[0]
    with local_cluster(declared, llama.spec_ending_at(first)) as cluster:
        completion = cluster.serve([request])["r"]
        counters = cluster.counters()
    assert (completion.tokens, completion.finish_reason) == ((first,), "stop")
    assert sum(counter.steps for counter in counters.values()) == 0


def test_eos_is_passed_over_when_the_request_ignores_it(llama: Oracle) -> None:
    request = Request(
        id=RequestId("r"), prompt_tokens=random_prompt(random.Random(1), 12), max_tokens=8, ignore_eos=True
    )
    expected = llama.tokens(request)
    with local_cluster(split(1, 1), llama.spec_ending_at(expected[0], expected[2])) as cluster:
        completion = cluster.serve([request])["r"]
    assert (completion.tokens, completion.finish_reason) == (expected, "length")


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_stop_string_ends_its_request_and_its_row_is_used_again(llama: Oracle, num_tokens: int) -> None:
    stopped, expected, stop = _with_printable_token(llama, num_tokens)
    others = ragged_requests(6, seed=11)
    with local_cluster(split(1, 2, token_rows=1, prompt_rows=1), llama.spec, codec=llama.codec) as cluster:
        completions = cluster.serve([stopped, *others])
    completion = completions.pop(RequestId("stopped"))
    assert completion.finish_reason == "stop"
    assert completion.tokens == expected[:num_tokens]
    assert completion.text == llama.codec.decode(expected[: num_tokens - 1])
    assert stop not in completion.text
    assert tokens_of(completions) == llama.all_tokens(others)


def test_sampled_requests_draw_the_same_tokens_on_every_split(llama: Oracle) -> None:
    params = [
        Sampling(temperature=0.8, seed=1),
        Sampling(temperature=1.3, top_k=20, seed=2),
        Sampling(temperature=1.0, top_p=0.7, seed=3),
        Sampling(),
    ]
    requests = [
        msgspec.structs.replace(request, sampling=params[index % len(params)], max_tokens=8)
        for index, request in enumerate(ragged_requests(7, seed=12))
    ]
    expected = llama.all_tokens(requests)
    for declared in (split(1, 1), split(3, 2), split(1, 3, scheduling="microbatch"), colocated(2)):
        with local_cluster(declared, llama.spec) as cluster:
            assert tokens_of(cluster.serve(requests)) == expected


def test_refused_requests_end_with_a_reason_and_others_are_served(llama: Oracle) -> None:
    served = ragged_requests(3, seed=13)
    refused = [
        Request(id=RequestId("empty"), prompt_tokens=(), max_tokens=4),
        Request(id=RequestId("long"), prompt_tokens=(1,) * 100, max_tokens=29),
        Request(id=RequestId("none"), prompt_tokens=(1,), max_tokens=0),
        Request(id=RequestId("unknown"), prompt_tokens=(1, 260), max_tokens=1),
    ]
    with local_cluster(split(1, 1), llama.spec) as cluster:
        completions = cluster.serve([*refused, *served])
    for request in refused:
        completion = completions.pop(request.id)
        assert (completion.finish_reason, completion.tokens) == ("error", ())
        assert completion.error
    assert tokens_of(completions) == llama.all_tokens(served)


def _with_printable_token(oracle: Oracle, num_tokens: int) -> tuple[Request, tuple[int, ...], str]:
    """A request whose ``num_tokens``-th token is a printable character that no earlier one is."""
    chooser = random.Random(0)
    for _ in range(200):
        request = Request(
            id=RequestId("stopped"), prompt_tokens=random_prompt(chooser, chooser.randint(2, 12)), max_tokens=8
        )
        tokens = oracle.tokens(request)
        if len(tokens) < 8:
            continue
        texts = [oracle.codec.decode([token]) for token in tokens[:num_tokens]]
        if all(text.isascii() and text.isprintable() for text in texts) and texts[-1] not in "".join(texts[:-1]):
            return msgspec.structs.replace(request, stop=(texts[-1],)), tokens, texts[-1]
    raise AssertionError("no such request among 200")
