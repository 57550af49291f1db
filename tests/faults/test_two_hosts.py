"""A cluster over two hosts with a network between them: workers started by hand, a link that goes, a lost host."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dejavu.models.reference import generate_batch, load_reference
from dejavu.models.tiny import make_tiny
from dejavu.models.tokenizer import TextCodec

from harness.launched import eventually
from harness.processes import our_processes, wait_gone
from harness.two_hosts import CLUSTER, STORE, TwoHosts, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.grid]

PROMPTS = ("hello there", "what", "a longer prompt than the others, by far", "no") * 6
MAX_TOKENS = 150


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    before = our_processes()
    with two_hosts(tmp_path) as made:
        yield made
    assert wait_gone(before, timeout_s=10.0) == {}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models"), num_layers=4, context=256)


def begin(hosts: TwoHosts, model: Path, *overrides: str) -> None:
    """The controller is here, with w0 and w2, a standby; w1 is there. Rows are copied to the other host."""
    lines = [json.dumps({"id": f"r{i}", "prompt": text}) for i, text in enumerate(PROMPTS)]
    (hosts.here.folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    words = [
        "cluster.launcher=none",
        f"cluster.name={CLUSTER}",
        f"cluster.host={hosts.here.interface}",
        "cluster.lease_ttl_s=2",
        "store=external",
        f"store.endpoints=[{STORE}]",
        "model=local",
        f"model.path={model}",
        "strategy=colocated",
        "strategy.stages=2",
        "strategy.replication=1",
        "strategy.standby=1",
        "strategy.microbatch.token=2",
        "transport.settings.UCX_TLS=tcp",
        "workload=file",
        "workload.path=prompts.jsonl",
        f"workload.max_tokens={MAX_TOKENS}",
        "workload.ignore_eos=true",
        "hydra.run.dir=run",
        *overrides,
    ]
    hosts.here.start("controller", [sys.executable, "-m", "dejavu.run", *words])
    for host, name in ((hosts.here, "w0"), (hosts.here, "w2"), (hosts.there, "w1")):
        host.start_worker(name)


def is_stepping(hosts: TwoHosts) -> Callable[[], bool]:
    return lambda: any(step >= 10 for step in copied(hosts))


def copied(hosts: TwoHosts) -> list[int]:
    lines = hosts.etcdctl("get", "--prefix", f"/dejavu/{CLUSTER}/acks/", "--print-value-only").splitlines()
    return [step for line in lines if line for step in json.loads(line).values()]


def check_end(hosts: TwoHosts, model: Path, *, num_repairs: int) -> None:
    """The run has ended well, and every token is the whole model's."""
    assert hosts.here.processes["controller"].wait(180.0) == 0, hosts.here.log_of("controller")
    run = hosts.here.folder / "run"
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    codec, whole = TextCodec(model), load_reference(model)
    right = {
        f"r{i}": generate_batch(whole, [codec.encode(text)], MAX_TOKENS, ignore_eos=True)[0]
        for i, text in enumerate(PROMPTS)
    }
    assert {row["id"]: row["tokens"] for row in rows} == right
    assert len(json.loads((run / "metrics.json").read_text())["repairs"]) == num_repairs


def test_workers_that_join_from_two_hosts_compute_the_right_tokens_over_a_slow_link(
    hosts: TwoHosts, model: Path
) -> None:
    for host in (hosts.here, hosts.there):
        host.shape("2mbit")
    begin(hosts, model)
    eventually(is_stepping(hosts), "tokens are made")
    addresses = {name: member.address.partition(":")[0] for name, member in hosts.members().items()}
    assert addresses["w0"] == addresses["w2"] != addresses["w1"]
    check_end(hosts, model, num_repairs=0)
    # The link was what it was said to be, in both directions.
    assert min(hosts.here.num_held_back(), hosts.there.num_held_back()) > 0
    assert hosts.there.processes["w1"].wait(20.0) == 0


def test_a_link_that_goes_down_is_repaired_and_the_worker_behind_it_ends_when_it_comes_back(
    hosts: TwoHosts, model: Path
) -> None:
    begin(hosts, model)
    eventually(is_stepping(hosts), "tokens are made")
    hosts.there.set_link("down")
    # Not only missed for a moment: that costs nothing but the moment.
    eventually(lambda: "w1" in hosts.etcdctl("get", f"/dejavu/{CLUSTER}/repairs/1"), "the repair has begun")
    hosts.there.set_link("up")
    check_end(hosts, model, num_repairs=1)
    assert hosts.there.processes["w1"].wait(60.0) == 1
    assert "was declared dead" in hosts.there.log_of("w1")


def test_a_lost_host_costs_a_pause(hosts: TwoHosts, model: Path) -> None:
    begin(hosts, model)
    eventually(is_stepping(hosts), "tokens are made")
    hosts.there.set_link("down")
    hosts.there.kill_all()
    check_end(hosts, model, num_repairs=1)
