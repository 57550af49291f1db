"""A worker that dies ends the run at once: named, with its exit status and its log; what was finished is on disk."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dejavu.errors import DejavuError
from dejavu.report.completions import read_completions
from dejavu.store.spec import StoreSpec

import harness.odd_worker
from harness.cluster_kit import cluster, ragged_requests
from harness.launched import eventually, launched, own_store

LOAD = ["model=tiny-llama", "workload=synthetic", "workload.num_requests=4000", "workload.prompt_tokens=30"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSpec]:
    with own_store(tmp_path_factory.mktemp("store")) as spec:
        yield spec


@pytest.mark.faults
@pytest.mark.parametrize("role", ["prompt", "token"])
def test_worker_killed_in_the_middle_of_work_ends_the_run_with_its_name_and_status(
    role: str, tmp_path: Path, store: StoreSpec
) -> None:
    with launched(tmp_path, store, *LOAD, "workload.max_tokens=20") as run:
        run.wait_state("serving", 2)
        eventually(lambda: run.num_completed() > 3, "some requests completed")
        victim = next(member for member in run.members().values() if member.pipeline == role)
        os.kill(victim.pid, signal.SIGKILL)
        status, _, err = run.end()
        num_lines = run.num_completed()
    assert status == 1
    assert f"worker {victim.name} died (killed by signal 9)" in err
    assert f"workers/{victim.name}.log" in err
    assert "Traceback" not in err
    completions = read_completions(run.completions)
    assert len(completions) == num_lines > 3
    assert all(completion.finish_reason == "length" for completion in completions)
    assert (run.folder / "metrics.json").exists()
    assert (run.folder / "plan.json").exists()


@pytest.mark.faults
def test_worker_that_fails_in_a_step_ends_the_run_with_the_end_of_its_log(output: Path, nothing_left: None) -> None:
    odd = (sys.executable, harness.odd_worker.__file__, "raise-in-step")
    with (
        pytest.raises(DejavuError, match=r"(?s)worker w1 died \(exit status 1\).*the third step fails on purpose"),
        cluster(output, "model=tiny-llama", worker_command=odd) as kit,
    ):
        kit.serve(ragged_requests(4, vocab_size=200))
