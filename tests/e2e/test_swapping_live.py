"""Real processes that swap: tokens equal transformers' own generate, also when one is killed in the middle of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dejavu.control.faults import AtStep, Fault
from dejavu.ids import WorkerName

from harness.cluster_kit import cluster, ragged_requests, reference_tokens, tokens_of

COMMON = (
    "model=tiny-llama",
    "strategy.microbatch.prompt=3",
    "strategy.microbatch.token=2",
    "strategy.in_flight=4",
    "strategy.swapping=on",
)
SPLIT = ("strategy=disaggregated", "strategy.split.prompt=1", "strategy.split.token=2")


@pytest.mark.slow
def test_a_worker_killed_while_microbatches_are_swapped_costs_no_token(output: Path, nothing_left: None) -> None:
    with cluster(output, *COMMON, *SPLIT, "strategy.replication=1") as kit:
        requests = ragged_requests(17, vocab_size=kit.plan.model.vocab_size, seed=3)
        victim = WorkerName("w2")
        served = kit.run(requests, Fault(kind="kill", worker=victim, trigger=AtStep(microbatch=1, step=3)))
        assert tokens_of(served.completions) == reference_tokens(kit.folder, requests)
        assert {failure.worker for journal in served.journals for failure in journal.failures} == {victim}
        swaps = [one.swap for one in served.counters.values() if one.pipeline == "token"]
    assert all(one.steps > 0 and one.bytes_in > 0 and one.bytes_out > 0 for one in swaps)


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("family", ["gpt2", "bloom", "qwen3"])
@pytest.mark.parametrize("level", ["naive", "buffered", "full"])
@pytest.mark.parametrize("shape", [SPLIT, ("strategy=colocated", "strategy.stages=3", "strategy.stream_to=memory")])
def test_tokens_equal_generate_at_every_streaming_level(
    family: str, level: str, shape: tuple[str, ...], output: Path, nothing_left: None
) -> None:
    overrides = (*COMMON, *shape, f"strategy.streaming={level}", f"model=tiny-{family}", "strategy.copy_steps=1")
    with cluster(output, *overrides) as kit:
        requests = ragged_requests(11, vocab_size=kit.plan.model.vocab_size, seed=4)
        assert tokens_of(kit.serve(requests)) == reference_tokens(kit.folder, requests)
