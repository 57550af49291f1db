"""A watch through everything that can happen to etcd (field report B16)."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

import pytest

from dejavu.store import PrefixWatch, StoreClient

from harness.store_server import PATIENCE_S, Recorder, StoreServer, client, nothing_left, server

__all__ = ["client", "nothing_left", "server"]

pytestmark = [pytest.mark.faults, pytest.mark.slow]

PREFIX = "/watched/"


@contextlib.contextmanager
def watching(server: StoreServer, recorder: Recorder) -> Iterator[PrefixWatch]:
    watch = PrefixWatch(server.spec, PREFIX, recorder)
    try:
        recorder.wait_for(lambda r: bool(r.changes), "the first listing")
        yield watch
    finally:
        recorder.gate.set()
        watch.stop()


def put_numbered(client: StoreClient, numbers: Iterator[int]) -> None:
    for number in numbers:
        assert client.put_if(f"{PREFIX}{number:04}", b"%d" % number, 0)


def assert_each_put_once_in_order(recorder: Recorder, total: int) -> None:
    recorder.wait_for(lambda r: len(r.state) == total, f"{total} keys")
    keys = [entry.key for change in recorder.changes for entry in change.puts]
    assert keys == [f"{PREFIX}{number:04}" for number in range(total)]
    revisions = [change.revision for change in recorder.changes]
    assert revisions == sorted(revisions)


def test_watch_starts_with_a_listing_and_reports_puts_and_deletes(server: StoreServer, client: StoreClient) -> None:
    client.put(PREFIX + "old", b"1")
    client.put("/elsewhere", b"1")
    recorder = Recorder()
    with watching(server, recorder):
        client.put(PREFIX + "new", b"2")
        client.put(PREFIX + "new", b"3")
        client.delete(PREFIX + "old")
        recorder.wait_for(lambda r: len(r.changes) == 4, "four changes")
    assert [entry.key for entry in recorder.changes[0].puts] == [PREFIX + "old"]
    assert recorder.puts_of(PREFIX + "new") == [b"2", b"3"]
    assert recorder.deletes == [PREFIX + "old"]


def test_watch_etcd_killed_repeatedly_under_writes_every_put_arrives_once_in_order(
    server: StoreServer, client: StoreClient
) -> None:
    recorder = Recorder()
    numbers = iter(range(120))
    with watching(server, recorder):
        for _ in range(3):
            put_numbered(client, itertools.islice(numbers, 20))
            server.kill()
            writer = threading.Thread(target=put_numbered, args=(client, itertools.islice(numbers, 20)))
            writer.start()
            server.start()
            writer.join()
        assert_each_put_once_in_order(recorder, 120)


def test_watch_etcd_frozen_until_the_stream_is_given_up_then_every_put_arrives_once(
    server: StoreServer, client: StoreClient, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    numbers = iter(range(40))
    noticed = threading.Event()
    caplog.handler.addFilter(lambda record: noticed.set() or True if "interrupted" in record.getMessage() else True)
    with watching(server, recorder):
        put_numbered(client, itertools.islice(numbers, 20))
        with server.frozen():
            assert noticed.wait(PATIENCE_S), "the silent member was not noticed"
        put_numbered(client, numbers)
        assert_each_put_once_in_order(recorder, 40)


def test_watch_etcd_wiped_old_keys_are_reported_deleted_and_new_ones_put(
    server: StoreServer, client: StoreClient
) -> None:
    recorder = Recorder()
    put_numbered(client, iter(range(5)))
    with watching(server, recorder):
        server.wipe()
        server.start()
        recorder.wait_for(lambda r: not r.state, "the loss of everything")
        client.put(PREFIX + "reborn", b"1")
        recorder.wait_for(lambda r: r.state == {PREFIX + "reborn": b"1"}, "the new key")
    assert recorder.changes[-1].revision < recorder.changes[0].revision


def test_watch_etcd_wiped_and_grown_past_the_old_revision_unseen_the_state_is_right(
    server: StoreServer, client: StoreClient
) -> None:
    recorder = Recorder()
    put_numbered(client, iter(range(3)))
    with watching(server, recorder):
        # The receiver is busy all the while, so the watch learns of nothing in between.
        recorder.gate.clear()
        client.put(PREFIX + "last", b"old")
        recorder.wait_for(lambda r: PREFIX + "last" in r.state, "the last of the old keys")
        server.wipe()
        server.start()
        for number in range(20):
            client.put(f"{PREFIX}other{number}", b"new")
        recorder.gate.set()
        recorder.wait_for(lambda r: len(r.state) == 20, "only the new keys")
    assert set(recorder.state.values()) == {b"new"}


def test_watch_history_compacted_during_an_outage_the_difference_is_delivered(
    server: StoreServer, client: StoreClient
) -> None:
    recorder = Recorder()
    put_numbered(client, iter(range(3)))
    with watching(server, recorder):
        recorder.gate.clear()
        client.put(PREFIX + "gate", b"")
        recorder.wait_for(lambda r: PREFIX + "gate" in r.state, "the change that keeps the receiver busy")
        server.kill()
        server.start()
        client.delete(PREFIX + "0000")
        client.put(PREFIX + "0001", b"changed")
        server.compact()
        recorder.gate.set()
        recorder.wait_for(lambda r: r.state.get(PREFIX + "0001") == b"changed", "the changed key")
        client.put(PREFIX + "after", b"")
        recorder.wait_for(lambda r: PREFIX + "after" in r.state, "a key after the gap")
    assert recorder.deletes == [PREFIX + "0000"]
    assert recorder.puts_of(PREFIX + "0002") == [b"2"]


def test_watch_receiver_that_raises_gets_the_next_change_all_the_same(server: StoreServer, client: StoreClient) -> None:
    recorder = Recorder()

    def fragile(change: object) -> None:
        recorder(change)  # type: ignore[arg-type]
        raise RuntimeError("a receiver's bug")

    watch = PrefixWatch(server.spec, PREFIX, fragile)
    try:
        client.put(PREFIX + "k", b"1")
        recorder.wait_for(lambda r: PREFIX + "k" in r.state, "the change after the bug")
    finally:
        watch.stop()


def test_watch_stopped_while_etcd_is_frozen_or_dead_ends_its_threads(server: StoreServer) -> None:
    # The fixture finds the threads if they do not end.
    recorder = Recorder()
    with server.frozen():
        PrefixWatch(server.spec, PREFIX, recorder).stop()
    server.kill()
    PrefixWatch(server.spec, PREFIX, recorder).stop()


def test_watch_first_endpoint_dead_follows_the_living_one(server: StoreServer, client: StoreClient) -> None:
    recorder = Recorder()
    spec = type(server.spec)(endpoints=("127.0.0.1:1", server.endpoint))
    watch = PrefixWatch(spec, PREFIX, recorder)
    try:
        client.put(PREFIX + "k", b"1")
        recorder.wait_for(lambda r: PREFIX + "k" in r.state, "the key through the second endpoint")
    finally:
        watch.stop()
