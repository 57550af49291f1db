"""Real processes, real etcd, real UCX: token ids equal transformers' own generate in every mode."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from dejavu.models.families import FAMILIES

from harness.cluster_kit import cluster, ragged_requests, reference_tokens, tokens_of

HEADS = {"4/4": (4, 4), "4/2": (4, 2), "4/1": (4, 1)}
ROTARY = ("llama", "mistral", "qwen2", "qwen3")


def split(prompt: int, token: int) -> list[str]:
    return ["strategy=disaggregated", f"strategy.split.prompt={prompt}", f"strategy.split.token={token}"]


def colocated(stages: int) -> list[str]:
    return ["strategy=colocated", f"strategy.stages={stages}"]


# The grid below has all combinations; tests/unit/test_engine_local_cluster.py more, in one process.
COVERING = [("qwen3", 7, "4/1", split(1, 2), "row")]

SHAPES = [*(split(prompt, token) for prompt, token in product((1, 2, 3), repeat=2)), *map(colocated, (1, 2, 3))]

GRID = [
    (
        family,
        5 + index % 3,
        list(HEADS)[index % 3] if family in ROTARY else "4/4",
        shape,
        ("row", "microbatch")[index % 2],
    )
    for family in FAMILIES
    for index, shape in enumerate(SHAPES)
]


def name(case: tuple[str, int, str, list[str], str]) -> str:
    family, num_layers, heads, shape, scheduling = case
    numbers = "x".join(word.rpartition("=")[2] for word in shape[1:])
    return f"{family}-{num_layers}-{heads.replace('/', 'by')}-{shape[0].rpartition('=')[2]}-{numbers}-{scheduling}"


def check(case: tuple[str, int, str, list[str], str], output: Path) -> None:
    family, num_layers, heads, shape, scheduling = case
    num_heads, num_kv_heads = HEADS[heads]
    overrides = [
        f"model=tiny-{family}",
        f"model.num_layers={num_layers}",
        f"model.num_heads={num_heads}",
        f"model.num_kv_heads={num_kv_heads}",
        "strategy.microbatch.prompt=3",
        "strategy.microbatch.token=2",
        "strategy.in_flight=2",
        f"strategy.scheduling={scheduling}",
    ]
    with cluster(output, *shape, *overrides) as kit:
        requests = ragged_requests(11, vocab_size=kit.plan.model.vocab_size, seed=num_layers)
        completions = kit.serve(requests)
    assert tokens_of(completions) == reference_tokens(kit.folder, requests)
    assert {completion.finish_reason for completion in completions.values()} <= {"stop", "length"}


@pytest.mark.slow
@pytest.mark.parametrize("case", COVERING, ids=name)
def test_tokens_of_a_cluster_equal_generate(
    case: tuple[str, int, str, list[str], str], output: Path, nothing_left: None
) -> None:
    check(case, output)


@pytest.mark.grid
@pytest.mark.parametrize("case", GRID, ids=name)
def test_tokens_of_every_family_and_shape_equal_generate(
    case: tuple[str, int, str, list[str], str], output: Path, nothing_left: None
) -> None:
    check(case, output)
