"""A declared state that somebody changes while the cluster starts is taken up as soon as it serves."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from dejavu.store.client import StoreClient
from dejavu.store.keys import Keys

from harness.launched import eventually, launched, own_store

pytestmark = [pytest.mark.slow, pytest.mark.grid]

KEYS = Keys("test")
WORDS = (
    "model=tiny-llama",
    "strategy=colocated",
    "strategy.stages=2",
    "strategy.microbatch.token=2",
    "workload=synthetic",
    "workload.num_requests=30",
    "workload.rate=5",
    "workload.prompt_tokens=8",
    "workload.max_tokens=20",
)


def test_a_wish_that_is_there_before_the_workers_serve_costs_nothing_and_the_next_one_is_taken_up_too(
    tmp_path: Path, nothing_left: None
) -> None:
    """The run used to end with "epoch 1 is not in force here; 2 is"."""
    with own_store(tmp_path) as store, contextlib.closing(StoreClient(store)) as client:

        def wish(revision: int, in_flight: int) -> None:
            entry = client.get(KEYS.spec)
            assert entry is not None
            state = json.loads(entry.value)
            state["revision"], state["strategy"]["in_flight"] = revision, in_flight
            assert client.put_if(KEYS.spec, json.dumps(state).encode(), entry.mod_revision, keeps_lease=True)

        def is_done(revision: int) -> bool:
            entry = client.get(KEYS.changes(revision))
            return entry is not None and json.loads(entry.value).get("phase") == "done"

        with launched(tmp_path, store, *WORDS) as run:
            eventually(lambda: client.get(KEYS.spec) is not None, "the state is declared")
            assert not run.members(), "no worker has come yet"
            wish(2, 3)
            eventually(lambda: is_done(2), "the first change is in force")
            wish(3, 4)
            eventually(lambda: is_done(3), "the second change is in force")
            status, _, err = run.end(120.0)
            assert status == 0, err
            assert run.num_completed() == 30
            assert json.loads((run.folder / "metrics.json").read_text())["repairs"] == []
