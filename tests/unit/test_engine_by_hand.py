"""Workers that nobody here starts: their command line, their spec, and their end with their cluster."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from dejavu.clock import VirtualClock
from dejavu.config import Config, LauncherKind, StoreKind, validate
from dejavu.config.declared import declared_state, read_declared
from dejavu.control.member import encode_json
from dejavu.engine.leader import LeaderWatch
from dejavu.engine.worker_arguments import await_spec, owned_spec, read_arguments
from dejavu.errors import ConfigError, Fatal
from dejavu.ids import WorkerName
from dejavu.transport.interface import address_of, address_towards
from operators.elsewhere import StartedElsewhere
from operators.ray_launcher import import_ray

WORDS = ["store.endpoints=[10.0.0.1:2379,10.0.0.2:2379]", "cluster.name=mine", "name=w3"]
ENVIRONMENT = {"DEJAVU_CLUSTER_SECRET": "long-enough-to-be-one"}


def test_a_command_line_says_where_the_cluster_is_and_the_environment_how_to_be_let_in() -> None:
    found = read_arguments([*WORDS, "host=eth7", "wait_s=5"], ENVIRONMENT)
    assert found.store.endpoints == ("10.0.0.1:2379", "10.0.0.2:2379")
    assert (found.cluster, found.name, found.host, found.wait_s) == ("mine", "w3", "eth7", 5.0)
    assert "long-enough" not in repr(found)


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        ([*WORDS, "nme=x"], ENVIRONMENT, "did you mean 'name'"),
        (WORDS[:2], ENVIRONMENT, "name is needed"),
        (WORDS, {}, "DEJAVU_CLUSTER_SECRET must stand in the environment"),
        (["store.endpoints=[nowhere]", *WORDS[1:]], ENVIRONMENT, "'nowhere' is not host:port"),
        ([*WORDS, "wait_s=soon"], ENVIRONMENT, "wait_s=soon"),
        (["store.endpoints=a:1", "cluster.name=a/b", "name=w0"], ENVIRONMENT, "cluster name 'a/b'"),
    ],
)
def test_a_wrong_command_line_is_refused_by_name(words: list[str], environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_arguments(words, environment)


def test_a_worker_waits_for_its_cluster_and_says_for_how_long() -> None:
    words = ["store.endpoints=127.0.0.1:1", *WORDS[1:], "host=lo", "wait_s=1", "store.timeout_s=0.1"]
    with pytest.raises(Fatal, match="waited for wait_s=1"):
        await_spec(words, ENVIRONMENT, VirtualClock())
    with pytest.raises(Fatal, match="there was none"):
        owned_spec(b"")


def test_an_interface_stands_for_its_address_and_a_name_for_itself() -> None:
    assert (address_of("lo"), address_of("some.host"), address_of("10.1.2.3")) == ("127.0.0.1", "some.host", "10.1.2.3")
    assert address_towards("127.0.0.1:2379") == "127.0.0.1"
    with pytest.raises(ConfigError, match="cannot be reached from here"):
        address_towards("no-such-host.invalid:1")


def test_the_clusters_secret_is_not_in_its_declared_state() -> None:
    config = Config()
    config.cluster.secret = "a-secret-of-the-cluster"
    assert b"a-secret" not in encode_json(declared_state(config))
    assert read_declared(encode_json(declared_state(config))).cluster.secret is None
    assert "a-secret" not in repr(config)


def test_a_cluster_of_workers_started_elsewhere_needs_a_secret() -> None:
    config = Config()
    config.cluster.launcher = LauncherKind.none
    with pytest.raises(ConfigError, match="DEJAVU_CLUSTER_SECRET"):
        validate(config)
    config.cluster.secret = "short"
    with pytest.raises(ConfigError, match="at least 16"):
        validate(config)


@pytest.mark.parametrize("leaders", [["one", "one", "two"], [None] * 3])
def test_a_worker_ends_when_another_controller_leads_or_none_does(
    leaders: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dejavu.engine.leader.time", SimpleNamespace(sleep=lambda seconds: None))
    seen = iter(leaders)

    def controller() -> object:
        incarnation = next(seen, leaders[-1])
        return None if incarnation is None else SimpleNamespace(incarnation=incarnation)

    gone = threading.Event()
    LeaderWatch(SimpleNamespace(controller=controller), gone.set, lease_ttl_s=2).start()  # type: ignore[arg-type]
    assert gone.wait(10.0)


def test_the_launcher_of_workers_started_elsewhere_starts_and_ends_nobody(tmp_path: Path) -> None:
    launcher, name = StartedElsewhere(tmp_path), WorkerName("w0")
    launcher.start(name)
    launcher.kill(name)
    launcher.signal(name, 9)
    launcher.tell(name, b"x")
    assert (launcher.running(), launcher.pids(), launcher.exits(), launcher.pid_of(name)) == (frozenset(), {}, (), None)
    assert not launcher.is_stopping()
    launcher.stop()
    assert launcher.is_stopping()
    assert not launcher.log_of(name).exists()


def test_ray_needs_a_store_and_a_controller_that_other_nodes_reach_and_says_when_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config()
    config.cluster.launcher, config.workload.max_tokens = LauncherKind.ray, 8
    with pytest.raises(ConfigError, match="needs store=external"):
        validate(config)
    config.store.kind, config.store.endpoints = StoreKind.external, ["10.0.0.1:2379"]
    with pytest.raises(ConfigError, match=r"cluster.host=127.0.0.1: workers on other nodes cannot reach it"):
        validate(config)
    config.cluster.host = "10.0.0.1"
    validate(config)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'dejavu\[ray\]'"):
        import_ray()
