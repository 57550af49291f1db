"""After the handoff every token stage holds exactly the KV cells that the whole model has, layer by layer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from dejavu.control.placement import Declared
from dejavu.ids import RequestId
from dejavu.models.tiny import CONTEXT
from dejavu.request import Request

from harness.local_cluster import local_cluster
from harness.oracle import Oracle, random_prompt

ATOL, RTOL = 2e-4, 1e-3


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Oracle:
    return Oracle.of("llama", folder)


def declared(prompt: int, token: int) -> Declared:
    return Declared(
        mode="disaggregated",
        prompt_depth=prompt,
        token_depth=token,
        prompt_rows=4,
        token_rows=2,
        in_flight=2,
        scheduling="row",
        timeout_s=30.0,
    )


@pytest.mark.parametrize("length", [1, 2, CONTEXT - 2])
@pytest.mark.parametrize("depths", [(1, 1), (3, 2), (2, 4)], ids=str)
def test_cells_after_handoff_and_steps_equal_the_reference_cache(
    llama: Oracle, depths: tuple[int, int], length: int
) -> None:
    """Field reports B01 (layers land in the wrong place) and B03 (off by one)."""
    prompt = random_prompt(random.Random(length), length)
    request = Request(id=RequestId("r"), prompt_tokens=prompt, max_tokens=2, ignore_eos=True)
    with local_cluster(declared(*depths), llama.spec) as cluster:
        tokens = cluster.serve([request])["r"].tokens
        cells = cluster.cells(0, 0, length + 1)
    assert tokens == llama.tokens(request)
    torch.testing.assert_close(cells, llama.cells([*prompt, tokens[0]]), atol=ATOL, rtol=RTOL)


def test_the_longest_prompt_that_leaves_room_for_one_token_gets_it(llama: Oracle) -> None:
    prompt = random_prompt(random.Random(0), CONTEXT - 1)
    request = Request(id=RequestId("r"), prompt_tokens=prompt, max_tokens=1, ignore_eos=True)
    with local_cluster(declared(2, 2), llama.spec) as cluster:
        assert cluster.serve([request])["r"].tokens == llama.tokens(request)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "qwen2"])
def test_ragged_rows_of_one_prompt_microbatch_land_in_their_own_places(folder: Path, family: str) -> None:
    oracle = Oracle.of(family, folder)
    chooser = random.Random(4)
    requests = [
        Request(id=RequestId(f"r{length}"), prompt_tokens=random_prompt(chooser, length), max_tokens=3, ignore_eos=True)
        for length in (9, 1, 30, 2)
    ]
    with local_cluster(declared(2, 3), oracle.spec) as cluster:
        completions = cluster.serve(requests)
        # Rows are dealt out to the two microbatches in turn.
        cells = [
            cluster.cells(index % 2, index // 2, len(request.prompt_tokens) + 2)
            for index, request in enumerate(requests)
        ]
    for request, found in zip(requests, cells, strict=True):
        tokens = [*request.prompt_tokens, *completions[request.id].tokens[:-1]]
        torch.testing.assert_close(found, oracle.cells(tokens), atol=ATOL, rtol=RTOL)
