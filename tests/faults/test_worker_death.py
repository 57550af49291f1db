"""A worker's death is repaired and told; where nobody can take its place, the run ends at once and says so."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dejavu.report.completions import read_completions
from dejavu.store.spec import StoreSpec

import harness.odd_worker
from harness.cluster_kit import cluster, ragged_requests, reference_tokens
from harness.judge import assert_right
from harness.launched import Launched, eventually, launched, own_store

pytestmark = pytest.mark.faults

NUM_REQUESTS = 150
LOAD = ["model=tiny-llama", "workload=synthetic", "workload.prompt_tokens=30", "workload.max_tokens=20"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSpec]:
    with own_store(tmp_path_factory.mktemp("store")) as spec:
        yield spec


def kill_one(run: Launched, num_workers: int, role: str) -> str:
    """The name of a worker that was killed in the middle of its work."""
    run.wait_state("serving", num_workers)
    eventually(lambda: run.num_completed() > 3, "some requests completed")
    victim = next(member for member in run.members().values() if member.pipeline == role)
    os.kill(victim.pid, signal.SIGKILL)
    return victim.name


@pytest.mark.grid
@pytest.mark.parametrize(
    ("role", "may_grow", "how"),
    [("prompt", "true", "process"), ("token", "false", "replan")],
)
def test_worker_killed_in_the_middle_of_work_costs_no_request_and_the_report_tells_of_it(
    role: str, may_grow: str, how: str, tmp_path: Path, store: StoreSpec
) -> None:
    words = [f"workload.num_requests={NUM_REQUESTS}", f"strategy.may_grow={may_grow}"]
    with launched(tmp_path, store, *LOAD, *words) as run:
        victim = kill_one(run, 2, role)
        status, out, err = run.end(120.0)
        completions = read_completions(run.completions)
        metrics = json.loads((run.folder / "metrics.json").read_text())
    assert status == 0, err
    assert "Traceback" not in err
    assert len({completion.id for completion in completions}) == len(completions) == NUM_REQUESTS
    assert all((one.finish_reason, len(one.tokens)) == ("length", 20) for one in completions)
    (repair,) = metrics["repairs"]
    assert [failure["worker"] for failure in repair["failures"]] == [victim]
    assert (repair["phase"], repair["how"]) == ("done", {victim: how})
    assert f"{victim} died (killed by signal 9)" in " ".join(out.split())
    assert metrics["requests"]["resumed"] == sum(completion.resumed > 0 for completion in completions)


@pytest.mark.grid
def test_worker_killed_whose_place_nobody_can_take_ends_the_run_with_its_name_and_status(
    tmp_path: Path, store: StoreSpec
) -> None:
    words = ["workload.num_requests=4000", "strategy=colocated", "strategy.stages=1", "strategy.may_grow=false"]
    with launched(tmp_path, store, *LOAD, *words) as run:
        victim = kill_one(run, 1, "colocated")
        status, _, err = run.end()
        num_lines = run.num_completed()
    assert status == 1
    assert f"worker {victim} died (killed by signal 9)" in err
    assert f"workers/{victim}.log" in err
    assert "Traceback" not in err
    completions = read_completions(run.completions)
    assert len(completions) == num_lines > 3
    assert all(completion.finish_reason == "length" for completion in completions)
    assert (run.folder / "metrics.json").exists()
    assert (run.folder / "plan.json").exists()


def test_worker_that_fails_in_a_step_says_why_and_its_rows_go_on_elsewhere(
    output: Path, tmp_path: Path, nothing_left: None
) -> None:
    odd = (sys.executable, harness.odd_worker.__file__, "raise-once", str(tmp_path / "raised"))
    with cluster(output, "model=tiny-llama", "strategy.may_grow=false", worker_command=odd) as kit:
        requests = ragged_requests(4, vocab_size=200)
        served = kit.run(requests)
        assert_right(served, reference_tokens(kit.folder, requests))
    assert [failure.worker for journal in served.journals for failure in journal.failures] == ["w1"]
    assert "the third step fails on purpose" in (output / "workers" / "w1.log").read_text()


@pytest.mark.grid
def test_prompt_that_fails_is_computed_again_and_nobody_dies(output: Path, tmp_path: Path, nothing_left: None) -> None:
    """Field report B12."""
    odd = (sys.executable, harness.odd_worker.__file__, "raise-in-prompt", str(tmp_path / "raised"))
    with cluster(output, "model=tiny-llama", worker_command=odd) as kit:
        requests = ragged_requests(4, vocab_size=200)
        served = kit.run(requests)
        assert_right(served, reference_tokens(kit.folder, requests))
    assert (tmp_path / "raised").exists()
    assert served.journals == ()
