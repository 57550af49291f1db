"""Calls while etcd is frozen, dead or being restarted: bounded, and hidden where they can be."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

from dejavu.store import StoreClient, StoreSpec, StoreUnavailable

from harness.store_server import StoreServer, client, nothing_left, server

__all__ = ["client", "nothing_left", "server"]

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def test_client_etcd_frozen_every_call_gives_up_and_works_again_afterwards(server: StoreServer) -> None:
    spec = StoreSpec(endpoints=(server.endpoint,), timeout_s=0.3)
    with contextlib.closing(StoreClient(spec)) as client:
        client.put("/k", b"1")
        with server.frozen():
            for call in (
                lambda: client.get("/k"),
                lambda: client.get_prefix("/"),
                lambda: client.put("/k", b"2"),
                lambda: client.put_if("/k2", b"2", 0),
                lambda: client.delete("/k3"),
                lambda: client.delete_prefix("/k3"),
            ):
                with pytest.raises(StoreUnavailable, match=server.endpoint):
                    call()
    with contextlib.closing(StoreClient(server.spec)) as client:
        assert client.put("/k", b"3") > 0


def test_client_etcd_dead_the_error_names_the_endpoint(server: StoreServer) -> None:
    server.kill()
    spec = StoreSpec(endpoints=(server.endpoint,), timeout_s=0.3)
    with (
        contextlib.closing(StoreClient(spec)) as client,
        pytest.raises(StoreUnavailable, match=f"{server.endpoint}.*refused"),
    ):
        client.get("/k")


def test_client_etcd_restarted_within_the_timeout_the_caller_notices_nothing(
    server: StoreServer, client: StoreClient
) -> None:
    client.put("/k", b"1")
    server.kill()
    swapped: list[bool] = []
    caller = threading.Thread(target=lambda: swapped.append(client.put_if("/new", b"x", 0)))
    caller.start()
    server.start()
    caller.join()
    assert swapped == [True]
    entry = client.get("/k")
    assert entry is not None
    assert entry.value == b"1"


def test_client_first_endpoint_dead_the_second_serves(server: StoreServer) -> None:
    spec = StoreSpec(endpoints=("127.0.0.1:1", server.endpoint))
    with contextlib.closing(StoreClient(spec)) as client:
        assert client.put("/k", b"1") > 0


def test_client_first_endpoint_frozen_the_second_serves(server: StoreServer, tmp_path: Path) -> None:
    folder = tmp_path / "second"
    folder.mkdir()
    second = StoreServer(folder)
    second.start()
    try:
        spec = StoreSpec(endpoints=(server.endpoint, second.endpoint), timeout_s=2.0)
        with contextlib.closing(StoreClient(spec)) as client, server.frozen():
            client.put("/k", b"1")
        with contextlib.closing(StoreClient(second.spec)) as client:
            assert client.get("/k") is not None
    finally:
        second.kill()
