"""However the launcher ends, nothing of the run is left (field report B23)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dejavu.store.spec import StoreSpec

from harness.launched import Launched, eventually, launched, own_store
from harness.processes import our_processes, wait_gone

LOAD = ["model=tiny-llama", "workload=synthetic", "workload.num_requests=4000", "workload.prompt_tokens=30"]
IDLE = [
    "model=tiny-llama",
    "workload=synthetic",
    "workload.num_requests=2",
    "workload.prompt_tokens=8",
    "workload.rate=0.0005",
]
TTL_S = 2
PROGRESS = ("store:", "workers ready:", "requests:")
"""What a run prints while all is well."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSpec]:
    with own_store(tmp_path_factory.mktemp("store")) as spec:
        yield spec


def reach(run: Launched, moment: str) -> None:
    """The run is loading its model, idle, or in the middle of its work."""
    if moment == "load":
        run.wait_state("starting", 2)
    else:
        run.wait_state("serving", 2)
    if moment == "work":
        eventually(lambda: run.num_completed() > 3, "some requests completed")


@pytest.mark.faults
@pytest.mark.parametrize(
    ("signum", "moment"),
    [
        pytest.param(signal.SIGINT, "load", marks=pytest.mark.grid),
        pytest.param(signal.SIGINT, "work", marks=pytest.mark.grid),
        pytest.param(signal.SIGINT, "idle", marks=pytest.mark.grid),
        pytest.param(signal.SIGTERM, "work", marks=pytest.mark.grid),
        pytest.param(signal.SIGKILL, "load", marks=pytest.mark.grid),
        (signal.SIGKILL, "work"),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value,
)
def test_launcher_ended_by_a_signal_leaves_no_process_and_no_key(
    signum: signal.Signals, moment: str, tmp_path: Path, store: StoreSpec
) -> None:
    before = our_processes()
    with launched(tmp_path, store, *(IDLE if moment == "idle" else LOAD), "workload.max_tokens=20") as run:
        reach(run, moment)
        run.send(signum)
        status, _, err = run.end()
    assert wait_gone(before, TTL_S + 5.0) == {}
    eventually(lambda: run.all_keys() == (), "no key is left", TTL_S + 5.0)
    if signum == signal.SIGKILL:
        assert status == -signal.SIGKILL
        assert_a_relaunch_works_the_first_time(tmp_path / "again", store)
    else:
        assert status == 130
        assert "Traceback" not in err
        assert len([line for line in err.splitlines() if not line.startswith(PROGRESS)]) < 10


def assert_a_relaunch_works_the_first_time(folder: Path, store: StoreSpec) -> None:
    folder.mkdir()
    with launched(folder, store, "model=tiny-llama", "workload.num_requests=2", "workload.max_tokens=4") as run:
        status, out, err = run.end(120.0)
    assert status == 0, err
    assert "2 of 2 finished" in out
