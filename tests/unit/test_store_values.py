"""Spec, keys, messages and the other values of the store: nothing here starts a process."""

from __future__ import annotations

import os
import socket

import msgspec
import pytest

from dejavu.errors import ConfigError
from dejavu.store import Keys, LeaseKeeper, StoreClient, StoreSpec
from dejavu.store.embedded import etcd_binary, free_ports
from dejavu.store.entry import prefix_end
from dejavu.store.keeper import is_stopped
from dejavu.store.keeper_messages import Lost, Start, Update, line_of, to_owner, to_sidecar


def test_spec_json_round_trip_is_the_same_spec() -> None:
    spec = StoreSpec(endpoints=("h:1", "[::1]:2379"), user="u", password="secret", timeout_s=0.5)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=StoreSpec) == spec


def test_spec_repr_hides_the_password() -> None:
    spec = StoreSpec(endpoints=("h:1",), user="u", password="secret")
    assert "secret" not in repr(spec)
    assert "secret" not in f"{spec}"
    assert "'u'" in repr(spec)


@pytest.mark.parametrize("endpoint", ["http://h:1", "h", "h:", "h:70000", "h:0", ":1", "a b:1", "::1:2379", "h:1/x"])
def test_spec_endpoint_that_is_not_host_and_port_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        StoreSpec(endpoints=(endpoint,))


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoints": ()},
        {"endpoints": ("h:1",), "cert": "c"},
        {"endpoints": ("h:1",), "cert": "c", "key": "k"},
        {"endpoints": ("h:1",), "user": "u"},
        {"endpoints": ("h:1",), "timeout_s": 0.0},
    ],
)
def test_spec_that_cannot_work_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="store"):
        StoreSpec(**wrong)  # type: ignore[arg-type]


def test_keys_follow_the_published_schema() -> None:
    keys = Keys("c1")
    assert keys.prefix == "/dejavu/c1/"
    assert (keys.spec, keys.plan, keys.status) == ("/dejavu/c1/spec", "/dejavu/c1/plan", "/dejavu/c1/status")
    assert keys.controller == "/dejavu/c1/controller"
    assert keys.workers_prefix == "/dejavu/c1/workers/"
    assert keys.worker("w0") == "/dejavu/c1/workers/w0"
    assert keys.acks("token", 2) == "/dejavu/c1/acks/token/2"
    assert keys.repairs(7) == "/dejavu/c1/repairs/7"


def test_keys_of_a_cluster_do_not_match_one_with_a_longer_name() -> None:
    assert not Keys("c12").plan.startswith(Keys("c1").prefix)


def test_keys_worker_of_gives_the_name_back_and_none_for_other_keys() -> None:
    keys = Keys("c1")
    assert keys.worker_of(keys.worker("w0")) == "w0"
    assert keys.worker_of(keys.plan) is None
    assert keys.worker_of(keys.workers_prefix) is None


@pytest.mark.parametrize("name", ["", "a/b", "/", "a b", ".x"])
def test_keys_ambiguous_cluster_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cluster name"):
        Keys(name)


@pytest.mark.parametrize(
    ("prefix", "end"), [(b"/a/", b"/a0"), (b"a\xff", b"b"), (b"\xff", b"\x00"), (b"", b"\x00"), (b"a\xfe", b"a\xff")]
)
def test_prefix_end_is_the_first_key_behind_the_prefix(prefix: bytes, end: bytes) -> None:
    assert prefix_end(prefix) == end


def test_keeper_messages_survive_the_pipe_on_one_line_each() -> None:
    spec = StoreSpec(endpoints=("h:1",))
    for message in (
        Start(spec=spec, ttl_s=2.0, entries={"k": b"a\nb\x00\xff"}, owner_pid=1, resumes=False),
        Update(entries={"k": b"\n"}),
    ):
        line = line_of(message)
        assert line.count(b"\n") == 1
        assert to_sidecar(line) == message
    assert to_owner(line_of(Lost())) == Lost()


def test_process_that_runs_or_is_gone_does_not_count_as_stopped() -> None:
    assert not is_stopped(os.getpid())
    assert not is_stopped(2**22 + 1)


def test_lease_keeper_with_more_keys_than_a_transaction_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 128"):
        LeaseKeeper(StoreSpec(endpoints=("h:1",)), 2.0, {str(index): b"" for index in range(129)})


def test_client_delete_of_an_empty_prefix_is_refused() -> None:
    with pytest.raises(ValueError, match="everything"):
        StoreClient(StoreSpec(endpoints=("h:1",))).delete_prefix("")


def test_free_ports_are_different_and_skip_taken_ones() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ports = free_ports(50)
        assert len(set(ports)) == 50
        assert taken.getsockname()[1] not in ports


def test_etcd_binary_is_found_and_executable() -> None:
    assert os.access(etcd_binary(), os.X_OK)
