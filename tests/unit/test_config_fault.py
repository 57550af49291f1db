"""Faults that cannot happen, and recoveries that cannot be, are refused before anything starts."""

from __future__ import annotations

import pytest

from dejavu.config import Recovery
from dejavu.errors import ConfigError

from harness.cluster_kit import configured

THREE = ("strategy.split.token=2", "strategy.standby=1")
"""w0 for prompts, w1 and w2 for tokens, w3 on standby."""


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        configured(*overrides)
    message = str(refused.value)
    assert len(message.splitlines()) <= 3
    return message


def test_a_worker_of_a_second_replica_can_be_killed_in_a_simulation() -> None:
    two = ("workflow=simulate", "profile=given", "profile.prompt_time_s=1", "profile.token_time_s=0.1", *THREE)
    kill = "fault.kill=[{worker: w7, at_s: 5}]"
    assert configured(*two, "simulate.replicas=2", kill).fault.kill[0].worker == "w7"
    assert "no such worker" in refusal(*two, kill)
    many = refusal(*two, "simulate.replicas=9", "fault.kill=[{at_s: 5}]")
    assert "w0 to w35" in many


@pytest.mark.parametrize(
    "entry",
    [
        "kill=[{worker: w2, step: 20}]",
        "kill=[{worker: w3, at_s: 0}]",
        "kill=[{worker: w1, phase: fence}, {worker: w2, step: 1, microbatch: 1}]",
        "stop=[{worker: w0, phase: prompt}]",
        "stop=[{worker: w0, at_s: 1.5, for_s: 3}]",
        "partition=[{worker: w1, step: 3, for_s: 8}]",
        "slow=[{worker: w1, step: 3, delay_s: 0.05}, {worker: w1, step: 9, delay_s: 0}]",
    ],
)
def test_a_fault_of_each_kind_and_moment_is_taken(entry: str) -> None:
    fault = configured(*THREE, f"fault.{entry}").fault
    assert len(fault.kill) + len(fault.stop) + len(fault.partition) + len(fault.slow) == entry.count("worker")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("kill=[{step: 20}]", "fault.kill[0] names no worker"),
        ("kill=[{worker: w4, step: 20}]", "fault.kill[0].worker=w4: no such worker\nvalid: w0, w1, w2, w3"),
        ("kill=[{worker: w1, step: 1}, {worker: w22, step: 1}]", "fault.kill[1].worker=w22"),
        ("kill=[{worker: worker2, step: 1}]", "valid: w0, w1, w2, w3"),
        ("kill=[{worker: w1}]", "exactly one of step, at_s and phase, and has none"),
        ("kill=[{worker: w1, step: 2, at_s: 3}]", "and has step and at_s"),
        ("kill=[{worker: w1, step: 0}]", "fault.kill[0].step=0: must be at least 1"),
        ("kill=[{worker: w1, step: 2, microbatch: 2}]", "fault.kill[0].microbatch=2: must be from 0 to 1"),
        ("kill=[{worker: w1, at_s: 2, microbatch: 1}]", "fault.kill[0].microbatch=1: goes with step"),
        ("kill=[{worker: w1, at_s: -1}]", "fault.kill[0].at_s=-1: must be at least 0 s"),
        ("kill=[{worker: w1, phase: restor}]", "did you mean 'restore'"),
        ("stop=[{worker: w1, step: 2, for_s: 0}]", "fault.stop[0].for_s=0: must be more than 0 s"),
        ("stop=[{worker: w1, step: 2, for_s: .inf}]", "fault.stop[0].for_s=inf"),
        ("partition=[{worker: w1, step: 2}]", "fault.partition[0].for_s=null"),
        ("slow=[{worker: w1, step: 2}]", "fault.slow[0].delay_s=null"),
        ("slow=[{worker: w1, step: 2, delay_s: -0.5}]", "fault.slow[0].delay_s=-0.5: must be at least 0 s"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused_with_its_place_and_what_is_valid(entry: str, words: str) -> None:
    assert words in refusal(*THREE, f"fault.{entry}".replace(".inf", "inf"))


def test_by_default_nothing_goes_wrong_nothing_is_copied_and_a_new_process_takes_a_dead_ones_place() -> None:
    config = configured()
    assert config.fault == type(config.fault)()
    strategy = config.strategy
    assert (strategy.replication, strategy.standby, strategy.may_grow) == (0, 0, True)
    assert strategy.recovery is Recovery.replica


@pytest.mark.parametrize(
    ("overrides", "most"),
    [
        (("strategy.split.token=3",), 2),
        (("strategy.split.prompt=3", "strategy.split.token=2"), 1),
        (("strategy=colocated", "strategy.stages=4"), 3),
        (("strategy=colocated",), 0),
    ],
)
def test_copies_go_to_fewer_successors_than_the_pipeline_that_keeps_rows_has_stages(
    overrides: tuple[str, ...], most: int
) -> None:
    assert configured(*overrides, f"strategy.replication={most}").strategy.replication == most
    for wrong in (most + 1, -1):
        message = refusal(*overrides, f"strategy.replication={wrong}")
        assert f"strategy.replication={wrong}: must be from 0 to {most}" in message


def test_replication_needs_streaming() -> None:
    message = refusal("strategy=colocated", "strategy.stages=2", "strategy.replication=1", "strategy.streaming='off'")
    assert "strategy.streaming=off" in message
    assert "strategy.replication=1" in message


def test_workers_on_standby_count_among_the_workers() -> None:
    assert configured(*THREE, "cluster.num_workers=4").strategy.num_workers == 4
    message = refusal(*THREE, "cluster.num_workers=3")
    assert "needs 4 workers (1 prompt + 2 token + 1 standby)" in message


def test_a_negative_number_of_standbys_is_refused() -> None:
    assert "strategy.standby=-1" in refusal("strategy.standby=-1")
