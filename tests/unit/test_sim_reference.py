"""Reference mode against the results of the original project's simulators, every case of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dejavu.sim.reference import colocated, disaggregated, group_arrivals

DATA = json.loads((Path(__file__).parent.parent / "data" / "original_simulators.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = DATA["cases"]
SPLIT = [(case, run) for case in CASES for run in case["disaggregated"]]


def named(case: dict[str, Any]) -> str:
    return str(case["name"])[0]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_arrivals_are_those_of_the_originals(case: dict[str, Any]) -> None:
    arrivals = group_arrivals(len(case["trace"]), case["rate"], case["num_machines"])

    assert arrivals == pytest.approx(case["arrival_s"], abs=1e-6)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_colocated_pipeline_ends_when_the_originals_does(case: dict[str, Any]) -> None:
    run, depth = case["colocated"], case["num_machines"]

    result = colocated(
        case["trace"],
        group_arrivals(len(case["trace"]), case["rate"], depth),
        depth=depth,
        prompt_s=run["prompt_ms"] / 1e3,
        token_s=run["token_ms"] / 1e3,
    )

    assert result.makespan_s == pytest.approx(run["makespan_s"], abs=1e-6)
    assert result.finish_s == pytest.approx(run["finish_s"], abs=1e-6)


@pytest.mark.parametrize(("case", "run"), SPLIT, ids=[f"{named(case)}-{run['split']}" for case, run in SPLIT])
def test_a_disaggregated_cluster_ends_when_the_originals_does(case: dict[str, Any], run: dict[str, Any]) -> None:
    prompt_depth, token_depth = run["split"]

    result = disaggregated(
        case["trace"],
        group_arrivals(len(case["trace"]), case["rate"], case["num_machines"]),
        prompt_depth=prompt_depth,
        token_depth=token_depth,
        prompt_s=run["prompt_ms"] / 1e3,
        token_s=run["token_ms"] / 1e3,
        cache_s=run["cache_ms"] / 1e3,
    )

    assert result.makespan_s == pytest.approx(run["makespan_s"], abs=1e-6)
    assert result.finish_s == pytest.approx(run["finish_s"], abs=1e-6)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_fewer_microbatches_than_machines_are_served(depth: int) -> None:
    times = {"prompt_s": 0.5, "token_s": 0.1}

    alone = colocated([3], [0.0], depth=depth, **times)
    split = disaggregated([3], [0.0], prompt_depth=1, token_depth=depth, cache_s=0.0, **times)

    assert alone.makespan_s == pytest.approx(depth * (0.5 + 3 * 0.1))
    assert split.makespan_s == pytest.approx(0.5 + 3 * depth * 0.1)


def test_a_run_of_no_microbatch_ends_at_once() -> None:
    assert colocated([], [], depth=2, prompt_s=1.0, token_s=1.0).makespan_s == 0.0


def test_the_even_pipeline_is_only_a_shorter_way() -> None:
    """Against a pass-by-pass account that knows no even pipeline."""
    trace, arrival_s, depth, prompt_s, token_s = (
        [7, 3, 9, 2, 5, 8, 1],
        [0.0, 0.0, 2.0, 0.1, 0.0, 3.0, 0.0],
        3,
        0.3,
        0.07,
    )

    def passes() -> list[float]:
        free_s, finish_s = [0.0] * depth, [0.0] * len(trace)
        queue = [(number, arrival_s[number], 0) for number in range(depth)]
        following = depth
        while queue:
            number, at_s, done = queue.pop(0)
            for stage in range(depth):
                at_s = free_s[stage] = max(at_s, free_s[stage]) + (token_s if done else prompt_s)
            if done < trace[number]:
                queue.append((number, at_s, done + 1))
                continue
            finish_s[number] = at_s
            if following < len(trace):
                queue.append((following, max(at_s, arrival_s[following]), 0))
                following += 1
        return finish_s

    result = colocated(trace, arrival_s, depth=depth, prompt_s=prompt_s, token_s=token_s)

    assert result.finish_s == pytest.approx(passes(), abs=1e-9)
