"""The controller of workers that somebody else started: killed and started again, and cut off from the store."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dejavu.store.client import StoreClient
from dejavu.store.keys import Keys
from dejavu.store.spec import StoreSpec

from harness.launched import Launched, eventually, launched, own_store
from harness.store_relay import StoreRelay

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.grid]

SECRET = "known-to-all-of-them"
NAMES = ("w0", "w1")
KEYS = Keys("test")
WORDS = (
    "cluster.launcher=none",
    "model=tiny-llama",
    "strategy=colocated",
    "strategy.stages=2",
    # A repair that is not needed would end the run.
    "strategy.may_grow=false",
    "workload=synthetic",
    "workload.prompt_tokens=8",
    "workload.max_tokens=20",
)
AWAY_S = 20.0
"""Longer than a worker's patience: three leases of 2 s and 5 s."""


class Supervisor:
    """Starts a worker by hand, and again as often as it ends, as systemd would."""

    def __init__(self, store: StoreSpec, name: str, log: Path) -> None:
        self.statuses: list[int] = []
        self._words = [
            sys.executable,
            "-m",
            "dejavu.worker",
            f"store.endpoints=[{store.endpoints[0]}]",
            "cluster.name=test",
            f"name={name}",
        ]
        self._log = log
        self._lock = threading.Lock()
        self._is_stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The worker has ended for good."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()
        self._thread.join(30.0)

    def _run(self) -> None:
        while True:
            with self._lock, self._log.open("ab") as log:
                if self._is_stopped:
                    return
                self._process = subprocess.Popen(
                    self._words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "DEJAVU_CLUSTER_SECRET": SECRET},
                )
            self.statuses.append(self._process.wait())


@contextlib.contextmanager
def supervised(store: StoreSpec, folder: Path) -> Iterator[list[Supervisor]]:
    workers = [Supervisor(store, name, folder / f"{name}.log") for name in NAMES]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.stop()


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEJAVU_CLUSTER_SECRET", SECRET)


def check_well(run: Launched, num_requests: int) -> None:
    """All is answered, and nothing had to be repaired."""
    status, _, err = run.end(120.0)
    assert status == 0, err
    assert run.num_completed() == num_requests
    assert json.loads((run.folder / "metrics.json").read_text())["repairs"] == []


def test_a_controller_that_is_killed_and_started_again_at_once_takes_new_workers_and_needs_no_repair(
    tmp_path: Path, nothing_left: None
) -> None:
    """It used to take the old ones, which ended in that moment, for its own."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with own_store(tmp_path) as store, supervised(store, tmp_path) as workers:
        # The second controller is up before the first one's lease is over, and leads as soon as it is.
        words = (*WORDS, "cluster.lease_ttl_s=12")
        with launched(tmp_path / "one", store, *words, "workload.num_requests=200", "workload.rate=4") as first:
            eventually(lambda: first.num_completed() >= 3, "requests end")
            first.send(signal.SIGKILL)
            first.end()
        with launched(tmp_path / "two", store, *words, "workload.num_requests=5") as second:
            check_well(second, 5)
        eventually(lambda: all(len(one.statuses) >= 2 for one in workers), "both workers have ended twice")
        assert {status for one in workers for status in one.statuses[:2]} == {0}


def test_a_controller_that_cannot_reach_the_store_keeps_its_workers_and_goes_on(
    tmp_path: Path, nothing_left: None
) -> None:
    with own_store(tmp_path) as store, supervised(store, tmp_path), StoreRelay(store.endpoints[0]) as relay:
        way = StoreSpec(endpoints=(relay.endpoint,))
        with (
            contextlib.closing(StoreClient(store)) as client,
            launched(tmp_path, way, *WORDS, "workload.num_requests=70", "workload.rate=2") as run,
        ):
            eventually(lambda: run.num_completed() >= 3, "requests end")
            before = {name: client.get(KEYS.worker(name)) for name in NAMES}
            relay.cut()
            eventually(lambda: client.get(KEYS.controller) is None, "the controller's lease has run out")
            done = run.num_completed()
            # Two a second come: this is time, told by the work that is done in it.
            eventually(lambda: run.num_completed() >= done + 2 * AWAY_S, "requests go on without the store")
            assert {name: client.get(KEYS.worker(name)) for name in NAMES} == before
            relay.mend()
            check_well(run, 70)
