"""Workers that a Ray cluster places: on different nodes, replaced when their process or their node is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dejavu.models.reference import generate_batch, load_reference
from dejavu.models.tiny import make_tiny
from dejavu.models.tokenizer import TextCodec

from harness.launched import Launched, eventually, launched, own_store

ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'dejavu[ray]')")

pytestmark = [pytest.mark.slow, pytest.mark.grid]

NUM_REQUESTS, MAX_TOKENS = 24, 120


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A Ray cluster of four nodes, of which three have room for one worker each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(3):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models"), num_layers=4, context=256)


@contextlib.contextmanager
def running(nodes: Any, model: Path, folder: Path, *more: str) -> Iterator[Launched]:
    lines = [json.dumps({"id": f"r{i}", "prompt": f"prompt {i}"}) for i in range(NUM_REQUESTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    words = [
        "cluster.launcher=ray",
        f"cluster.ray_address={nodes.address}",
        f"cluster.host={nodes.address.partition(':')[0]}",
        "model=local",
        f"model.path={model}",
        "strategy=colocated",
        "strategy.stages=2",
        "strategy.replication=1",
        "strategy.microbatch.token=2",
        "workload=file",
        "workload.path=prompts.jsonl",
        f"workload.max_tokens={MAX_TOKENS}",
        "workload.ignore_eos=true",
        *more,
    ]
    with own_store(folder) as store, launched(folder, store, *words) as made:
        yield made


@pytest.fixture
def run(nodes: Any, model: Path, tmp_path: Path) -> Iterator[Launched]:
    with running(nodes, model, tmp_path) as made:
        yield made


def check_end(run: Launched, model: Path, *, num_repairs: int) -> None:
    status, _, err = run.end(240.0)
    assert status == 0, err
    codec, whole = TextCodec(model), load_reference(model)
    rows = {row["id"]: row["tokens"] for row in map(json.loads, run.completions.read_text().splitlines())}
    assert rows == {
        f"r{i}": generate_batch(whole, [codec.encode(f"prompt {i}")], MAX_TOKENS, ignore_eos=True)[0]
        for i in range(NUM_REQUESTS)
    }
    assert len(json.loads((run.folder / "metrics.json").read_text())["repairs"]) == num_repairs


def test_workers_lie_on_different_nodes_and_a_killed_one_is_placed_again(run: Launched, model: Path) -> None:
    run.wait_state("serving", 2)
    pids = {member.name: member.pid for member in run.members().values()}
    raylets = {_raylet_of(pid) for pid in pids.values()}
    assert len(raylets) == 2
    eventually(lambda: run.num_completed() >= 2, "requests end")
    os.kill(pids["w1"], signal.SIGKILL)
    check_end(run, model, num_repairs=1)


def test_a_lost_node_costs_a_pause(run: Launched, nodes: Any, model: Path) -> None:
    lose_node_of(run, nodes)
    check_end(run, model, num_repairs=1)


def test_a_lost_workers_place_waits_while_ray_has_no_room_and_one_process_takes_it(
    nodes: Any, model: Path, tmp_path: Path
) -> None:
    """What was asked for in vain used to be placed later as well: several workers of a name."""
    while len(nodes.worker_nodes) > 2:
        nodes.remove_node(next(iter(nodes.worker_nodes)))
    with running(nodes, model, tmp_path, "cluster.start_timeout_s=30") as run:
        lose_node_of(run, nodes)
        eventually(lambda: "w1" not in [member.name for member in run.members().values()], "it is missed")
        # Longer than it may take to serve.
        time.sleep(35.0)
        nodes.add_node(num_cpus=2)
        check_end(run, model, num_repairs=1)
        assert (run.folder / "workers" / "w1.log").read_text().count(" listens at ") == 2


def lose_node_of(run: Launched, nodes: Any) -> None:
    """The node of w1 is gone, with requests under way."""
    run.wait_state("serving", 2)
    (pid,) = (member.pid for member in run.members().values() if member.name == "w1")
    (node,) = (one for one in nodes.worker_nodes if one.all_processes["raylet"][0].process.pid == _raylet_of(pid))
    eventually(lambda: run.num_completed() >= 2, "requests end")
    nodes.remove_node(node, allow_graceful=False)


def _raylet_of(pid: int) -> int:
    """The process of Ray's node above a worker's: its owner's parent."""
    owner = _parent(pid)
    return _parent(owner)


def _parent(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("PPid:")[2].split()[0])
