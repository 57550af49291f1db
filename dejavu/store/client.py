"""Reads and writes of the store, each within the spec's timeout."""

from __future__ import annotations

from typing import Any

from dejavu.store.connection import Connection
from dejavu.store.entry import Entry, Snapshot, entry_of, prefix_end
from dejavu.store.failover import Failover
from dejavu.store.spec import StoreSpec


class StoreClient:
    """A client of etcd for any number of threads. It connects at the first call.

    Every call blocks for at most ``spec.timeout_s``, hides a short outage within that time, and raises
    StoreUnavailable (nobody answered; a write may have taken effect) or StoreRefused (not let in).
    """

    def __init__(self, spec: StoreSpec) -> None:
        self._failover = Failover(spec)

    def get(self, key: str) -> Entry | None:
        """The key's entry, or None when there is none. Linearizable."""

        def operation(connection: Connection, timeout_s: float) -> Entry | None:
            request = connection.rpc.RangeRequest(key=key.encode())
            answer = connection.call(connection.kv.Range, request, timeout_s)
            return entry_of(answer.kvs[0]) if answer.kvs else None

        return self._failover.run(operation)

    def get_prefix(self, prefix: str) -> Snapshot:
        """All entries whose keys start with ``prefix``, at one revision. Linearizable."""

        def operation(connection: Connection, timeout_s: float) -> Snapshot:
            return list_prefix(connection, prefix, timeout_s)

        return self._failover.run(operation)

    def put(self, key: str, value: bytes) -> int:
        """The key has the value; returns the revision of that write. It may be written twice after an outage."""

        def operation(connection: Connection, timeout_s: float) -> int:
            request = connection.rpc.PutRequest(key=key.encode(), value=value)
            return int(connection.call(connection.kv.Put, request, timeout_s).header.revision)

        return self._failover.run(operation)

    def put_if(
        self, key: str, value: bytes, mod_revision: int, *, lease_id: int = 0, keeps_lease: bool = False
    ) -> bool:
        """True when the key was still at ``mod_revision`` (0: absent) and now has the value; else False, unchanged.

        ``lease_id`` is the lease that the key lives on; 0: none, or with ``keeps_lease`` the one that it is on already.
        When the answer to a first try was lost and the value is found in place, that counts as written by us, so
        writers that compete must write different values (name themselves or their epoch in it).
        """
        tried = False

        def operation(connection: Connection, timeout_s: float) -> bool:
            nonlocal tried
            earlier_may_have_won, tried = tried, True
            swap = _swap(connection.rpc, key, value, mod_revision, lease_id, keeps_lease)
            answer = connection.call(connection.kv.Txn, swap, timeout_s)
            if answer.succeeded:
                return True
            found = answer.responses[0].response_range.kvs
            return earlier_may_have_won and bool(found) and found[0].value == value

        return self._failover.run(operation)

    def delete(self, key: str) -> None:
        """The key is absent."""
        self._delete(key.encode(), b"")

    def delete_prefix(self, prefix: str) -> None:
        """No key starts with ``prefix``. Raises ValueError on an empty prefix, which would mean everything."""
        if not prefix:
            raise ValueError("an empty prefix would delete everything in etcd")
        self._delete(prefix.encode(), prefix_end(prefix.encode()))

    def close(self) -> None:
        """Later calls raise StoreUnavailable; those in flight in other threads end within their timeout. Idempotent."""
        self._failover.close()

    def _delete(self, key: bytes, range_end: bytes) -> None:
        def operation(connection: Connection, timeout_s: float) -> None:
            request = connection.rpc.DeleteRangeRequest(key=key, range_end=range_end)
            connection.call(connection.kv.DeleteRange, request, timeout_s)

        self._failover.run(operation)


def list_prefix(connection: Connection, prefix: str, timeout_s: float, *, revision: int = 0) -> Snapshot:
    """The entries under ``prefix`` on this connection, now or as they stood at ``revision``."""
    request = connection.rpc.RangeRequest(key=prefix.encode(), range_end=prefix_end(prefix.encode()), revision=revision)
    answer = connection.call(connection.kv.Range, request, timeout_s)
    return Snapshot(entries=tuple(map(entry_of, answer.kvs)), revision=revision or answer.header.revision)


def _swap(rpc: Any, key: str, value: bytes, mod_revision: int, lease_id: int, keeps_lease: bool) -> Any:
    """A transaction: put when the key is at ``mod_revision``, otherwise read it."""
    compare = rpc.Compare(key=key.encode(), target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=mod_revision)
    put = rpc.RequestOp(
        request_put=rpc.PutRequest(key=key.encode(), value=value, lease=lease_id, ignore_lease=keeps_lease)
    )
    read = rpc.RequestOp(request_range=rpc.RangeRequest(key=key.encode()))
    return rpc.TxnRequest(compare=[compare], success=[put], failure=[read])
