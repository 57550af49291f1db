"""Who was declared dead and lives, or comes back, is told apart from its successor (field reports B17 and B24)."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from dejavu.ids import WorkerName
from dejavu.store.embedded import free_ports

import harness.hand_worker
import harness.odd_worker
from harness.cluster_kit import cluster, ragged_requests, tokens_of
from harness.fault_relay import kill, stop
from harness.judge import WhenCounted, assert_right, is_alive, token_stage
from harness.launched import eventually

pytestmark = pytest.mark.faults

W1 = WorkerName("w1")
TTL = "cluster.lease_ttl_s=2"
RING = ["model=tiny-llama", "strategy=colocated", "strategy.stages=2", "strategy.replication=1", TTL]


@pytest.mark.grid
def test_worker_of_nobodys_frozen_and_replaced_wakes_reads_that_it_was_declared_dead_and_ends_by_itself(
    tmp_path: Path, output: Path, nothing_left: None
) -> None:
    by_hand = (sys.executable, harness.hand_worker.__file__, "w1", str(tmp_path))
    with cluster(output, *RING, worker_command=by_hand) as kit:
        requests = ragged_requests(12, vocab_size=kit.plan.model.vocab_size, seed=6, max_tokens=40)
        expected = tokens_of(kit.run(requests).completions)
        pid = int((tmp_path / "w1.pid").read_text())
        try:
            freeze = WhenCounted(kit, 60, lambda: os.kill(pid, signal.SIGSTOP))
            served = kit.run(requests, watcher=freeze, dead={W1})
            assert_right(served, expected)
            assert {failure.cause for journal in served.journals for failure in journal.failures} == {"lease"}
            assert is_alive(pid)
            successor = kit.members()[W1].incarnation
            wake = WhenCounted(kit, 60, lambda: os.kill(pid, signal.SIGCONT))
            served = kit.run(requests, watcher=wake)
            assert_right(served, expected)
            eventually(lambda: not is_alive(pid), "the old worker has ended by itself", 30.0)
        finally:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        assert "this incarnation was declared dead" in (output / "workers" / "w1.log").read_text()
        served = kit.run(requests)
        assert_right(served, expected)
        assert served.journals == ()
        assert kit.members()[W1].incarnation == successor


@pytest.mark.grid
def test_worker_back_on_the_same_address_before_and_after_its_lease_ended_is_linked_as_the_new_one(
    output: Path, nothing_left: None
) -> None:
    (first_port,) = free_ports(1)
    odd = (sys.executable, harness.odd_worker.__file__, "fixed-port", str(first_port))
    with cluster(output, *RING, worker_command=odd) as kit:
        requests = ragged_requests(12, vocab_size=kit.plan.model.vocab_size, seed=6, max_tokens=40)
        expected = tokens_of(kit.run(requests).completions)
        for fault in (kill(token_stage(kit, 1), 10), stop(token_stage(kit, 0), 10)):
            old = kit.members()[fault.worker]
            served = kit.run(requests, fault)
            assert_right(served, expected)
            new = kit.members()[fault.worker]
            assert (new.address, new.pid != old.pid) == (old.address, True)
            assert new.incarnation != old.incarnation
            assert {how for journal in served.journals for how in journal.how.values()} == {"process"}
            assert len(kit.members()) == 2
