"""A worker that a person starts joins its cluster, serves, and ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.launched import launched, own_store

pytestmark = pytest.mark.slow


def test_a_worker_started_by_hand_before_its_cluster_serves_it_and_ends_with_it(
    tmp_path: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEJAVU_CLUSTER_SECRET", "known-to-both-of-them")
    words = ["cluster.launcher=none", "model=tiny-llama", "strategy=colocated", "workload=synthetic"]
    sizes = ["workload.num_requests=3", "workload.prompt_tokens=8", "workload.max_tokens=6"]
    with own_store(tmp_path) as store, (tmp_path / "w0.log").open("wb") as log:
        place = [f"store.endpoints=[{store.endpoints[0]}]", "cluster.name=test", "name=w0"]
        worker = subprocess.Popen(
            [sys.executable, "-m", "dejavu.worker", *place],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            with launched(tmp_path, store, *words, *sizes) as run:
                status, _, err = run.end(120.0)
                assert status == 0, err
                assert run.num_completed() == 3
                secret = b"known-to-both-of-them"
                assert not [path for path in run.folder.rglob("*") if path.is_file() and secret in path.read_bytes()]
            assert worker.wait(20.0) == 0
        finally:
            worker.kill()
            worker.wait()
