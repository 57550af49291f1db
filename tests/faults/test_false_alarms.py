"""A living worker is never declared dead because it is busy (field report B17)."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dejavu.control.member import decode_member
from dejavu.store import Change, Keys, PrefixWatch, StoreSpec

import harness.odd_worker
from harness.cluster_kit import Kit, cluster, ragged_requests, reference_tokens
from harness.judge import assert_right
from harness.launched import own_store

TTL_S = 2


class Attendance:
    """The states that each worker's key went through; a deletion is one too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.states: dict[str, list[str]] = {}

    def __call__(self, change: Change) -> None:
        with self._lock:
            for entry in change.puts:
                self.states.setdefault(entry.key, []).append(decode_member(entry.value).state)
            for key in change.deletes:
                self.states.setdefault(key, []).append("gone")


@contextmanager
def attended(store: StoreSpec, cluster_name: str) -> Iterator[Attendance]:
    attendance = Attendance()
    watch = PrefixWatch(store, Keys(cluster_name).workers_prefix, attendance)
    try:
        yield attendance
    finally:
        watch.stop()


@contextmanager
def odd_cluster(folder: Path, store: StoreSpec, *odd: str) -> Iterator[Kit]:
    with cluster(
        folder / "output",
        "model=tiny-llama",
        "store=external",
        f"store.endpoints=[{store.endpoints[0]}]",
        f"cluster.lease_ttl_s={TTL_S}",
        worker_command=(sys.executable, harness.odd_worker.__file__, *odd),
    ) as kit:
        yield kit


def serve_and_check(kit: Kit) -> None:
    requests = ragged_requests(6, vocab_size=kit.plan.model.vocab_size, seed=8)
    served = kit.run(requests)
    assert_right(served, reference_tokens(kit.folder, requests))
    assert kit.cluster.journals() == ()


@pytest.mark.grid
@pytest.mark.faults
def test_worker_that_loads_for_three_ttls_with_the_gil_held_is_starting_and_not_dead(tmp_path: Path) -> None:
    with (
        own_store(tmp_path) as store,
        attended(store, "dejavu") as attendance,
        odd_cluster(tmp_path, store, "slow-load", str(3 * TTL_S)) as kit,
    ):
        serve_and_check(kit)
        states = {key: list(seen) for key, seen in attendance.states.items()}
    assert len(states) == 2
    for seen in states.values():
        assert seen == ["starting", "ready", "serving"]


@pytest.mark.grid
@pytest.mark.faults
def test_worker_that_holds_the_gil_for_two_ttls_in_a_step_beside_busy_cores_is_not_declared_dead(
    tmp_path: Path,
) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        with (
            own_store(tmp_path) as store,
            attended(store, "dejavu") as attendance,
            odd_cluster(tmp_path, store, "hold-gil", str(2 * TTL_S)) as kit,
        ):
            serve_and_check(kit)
            states = {key: list(seen) for key, seen in attendance.states.items()}
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert all("gone" not in seen for seen in states.values())
