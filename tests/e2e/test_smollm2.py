"""The default model answers real prompts with exactly the tokens that it gives in one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from dejavu.ids import RequestId
from dejavu.request import Request
from dejavu.workload import load

from harness.cluster_kit import cluster, reference_tokens, tokens_of

SHAPES = {
    "1+1": ["strategy=disaggregated"],
    "2+1": ["strategy=disaggregated", "strategy.split.prompt=2"],
    "1+2": ["strategy=disaggregated", "strategy.split.token=2"],
    "colocated-2": ["strategy=colocated", "strategy.stages=2"],
}
IN_THE_GRID = ("2+1", "1+2", "colocated-2")
"""Tiny models go through these shapes in the default run."""


@cache
def expected(folder: Path, requests: tuple[Request, ...]) -> dict[RequestId, tuple[int, ...]]:
    return reference_tokens(folder, requests)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=[pytest.mark.grid] * (name in IN_THE_GRID)) for name, shape in SHAPES.items()],
    ids=list(SHAPES),
)
def test_the_default_model_answers_the_built_in_prompts_like_generate(
    shape: list[str], output: Path, nothing_left: None
) -> None:
    sizes = ["model.max_length=256", "strategy.microbatch.token=4", "workload.max_tokens=8"]
    with cluster(output, *shape, *sizes) as kit:
        requests = load(kit.config.workload, codec=kit.codec)
        completions = kit.serve(requests)
    assert tokens_of(completions) == expected(kit.folder, tuple(requests))
    assert all(completion.text for completion in completions.values())
