"""A rehearsed cluster is a real one: what a repair brings back decides its tokens, and nothing is left of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cluster_kit import cluster, ragged_requests, tokens_of
from harness.fault_relay import kill
from harness.judge import assert_from_copies, assert_right, token_stage

pytestmark = pytest.mark.faults

OPT = [
    "model=opt-66b",
    "model.compute=modelled",
    "model.time_scale=0.1",
    "model.max_length=128",
    "profile=published",
    "cluster.devices_per_machine=2",
    "workload=synthetic",
    "strategy.microbatch.prompt=3",
    "strategy.microbatch.token=2",
]
RING = ["strategy=colocated", "strategy.stages=4", "strategy.replication=1", "strategy.standby=1"]


@pytest.mark.usefixtures("nothing_left")
def test_a_rehearsed_ring_that_loses_a_stage_goes_on_from_copies_with_the_same_tokens(output: Path) -> None:
    with cluster(output, *OPT, *RING) as kit:
        requests = ragged_requests(10, vocab_size=kit.plan.model.vocab_size, max_tokens=30)
        expected = tokens_of(kit.run(requests).completions)
        assert len(set(expected.values())) == len(requests)
        assert all(len(expected[request.id]) == request.max_tokens for request in requests)
        served = kit.run(requests, kill(token_stage(kit, 2), 10))
        assert_right(served, expected)
        assert_from_copies(served)
        for counters in served.counters.values():
            assert counters.rehearsal is not None
            assert counters.rehearsal.passes > 0
            assert counters.weight_bytes == 0


@pytest.mark.grid
@pytest.mark.parametrize("tier", ["replica", "recompute", "restart"])
@pytest.mark.parametrize("may_grow", [True, False])
def test_every_way_to_recover_gives_a_rehearsed_ring_the_same_tokens(output: Path, tier: str, may_grow: bool) -> None:
    ring = ["strategy=colocated", "strategy.stages=4", f"strategy.replication={int(tier == 'replica')}"]
    rules = [f"strategy.recovery={tier}", f"strategy.may_grow={str(may_grow).lower()}"]
    with cluster(output, *OPT, *ring, *rules) as kit:
        requests = ragged_requests(10, vocab_size=kit.plan.model.vocab_size, max_tokens=30)
        expected = tokens_of(kit.run(requests).completions)
        assert_right(kit.run(requests, kill(token_stage(kit, 1), 10)), expected)


@pytest.mark.grid
@pytest.mark.parametrize("stage", ["prompt", "token"])
def test_a_rehearsed_split_that_loses_a_stage_goes_on_with_the_same_tokens(output: Path, stage: str) -> None:
    split = ["strategy.split.prompt=1", "strategy.split.token=3", "strategy.in_flight=4", "strategy.replication=1"]
    with cluster(output, *OPT, *split) as kit:
        requests = ragged_requests(10, vocab_size=kit.plan.model.vocab_size, max_tokens=30)
        expected = tokens_of(kit.run(requests).completions)
        victim = kit.plan_now.prompt_pipeline.stages[0].worker if stage == "prompt" else token_stage(kit, 1)
        assert_right(kit.run(requests, kill(victim, 10)), expected)
