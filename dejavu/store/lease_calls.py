"""The calls about one lease: grant, refresh, put under it, revoke."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import grpc

from dejavu.errors import Retryable
from dejavu.store.connection import Connection
from dejavu.store.failover import Failover
from dejavu.store.faults import is_lease_gone
from dejavu.store.spec import StoreSpec

# etcd's own limit for the operations of one transaction.
MAX_ENTRIES = 128
T = TypeVar("T")

_SHORTEST_TIMEOUT_S = 0.5
_REVOKE_TIMEOUT_S = 1.5


class LeaseGone(Retryable):
    """etcd does not hold the lease (any more): it ran out, or etcd lost its data."""


class KeysChanged(Retryable):
    """The keys are not as they were when they were looked at; look again."""


class LeaseCalls:
    """A lease's calls, each bounded so that a hanging member leaves time for a second try within the TTL.

    All raise StoreUnavailable or StoreRefused.
    """

    def __init__(self, spec: StoreSpec, ttl_s: float) -> None:
        self._failover = Failover(spec)
        self._ttl_s = max(1, math.ceil(ttl_s))
        self._timeout_s = min(spec.timeout_s, max(_SHORTEST_TIMEOUT_S, self._ttl_s / 3))
        self.granted_s = float(self._ttl_s)
        """The TTL that etcd granted; it may be longer than the one asked for (1.5 election timeouts at least)."""

    def grant(self) -> int:
        """A new lease's id."""

        def operation(connection: Connection, timeout_s: float) -> int:
            request = connection.rpc.LeaseGrantRequest(TTL=self._ttl_s)
            answer = connection.call(connection.leases.LeaseGrant, request, timeout_s)
            self.granted_s = float(answer.TTL)
            return int(answer.ID)

        return self._failover.run(operation, timeout_s=self._timeout_s)

    def refresh(self, lease_id: int) -> None:
        """The lease has its whole TTL again. Raises LeaseGone."""

        def operation(connection: Connection, timeout_s: float) -> int:
            return connection.keep_alive(lease_id, timeout_s)

        if self._run(operation, lease_id, self._timeout_s) <= 0:
            raise LeaseGone(f"lease {lease_id:x} has run out")

    def look(self, names: Sequence[str]) -> dict[str, tuple[bytes, int]]:
        """The values of those keys that are there, each with the revision at which it was put."""

        def operation(connection: Connection, timeout_s: float) -> dict[str, tuple[bytes, int]]:
            rpc = connection.rpc
            gets = [rpc.RequestOp(request_range=rpc.RangeRequest(key=name.encode())) for name in names]
            answer = connection.call(connection.kv.Txn, rpc.TxnRequest(success=gets), timeout_s)
            found = [pair for response in answer.responses for pair in response.response_range.kvs]
            return {pair.key.decode(): (pair.value, int(pair.mod_revision)) for pair in found}

        return self._failover.run(operation, timeout_s=self._timeout_s) if names else {}

    def put_all(
        self, entries: Mapping[str, bytes], lease_id: int, revisions: Mapping[str, int] | None = None
    ) -> tuple[str, ...]:
        """All keys have their values, under the lease, at one revision; returns those that were absent before.

        With ``revisions``, only if every key was put last at its one (0: is absent). Raises LeaseGone, KeysChanged.
        """
        if not entries:
            return ()
        names = tuple(entries)

        def operation(connection: Connection, timeout_s: float) -> tuple[str, ...]:
            rpc = connection.rpc
            puts = [
                rpc.RequestOp(
                    request_put=rpc.PutRequest(key=name.encode(), value=entries[name], lease=lease_id, prev_kv=True)
                )
                for name in names
            ]
            same = [
                rpc.Compare(
                    key=name.encode(),
                    target=rpc.Compare.CompareTarget.Value("MOD"),
                    result=rpc.Compare.CompareResult.Value("EQUAL"),
                    mod_revision=revision,
                )
                for name, revision in (revisions or {}).items()
            ]
            answer = connection.call(connection.kv.Txn, rpc.TxnRequest(compare=same, success=puts), timeout_s)
            if not answer.succeeded:
                raise KeysChanged(f"somebody else has put one of {', '.join(names)} meanwhile")
            pairs = zip(names, answer.responses, strict=True)
            return tuple(name for name, response in pairs if not response.response_put.HasField("prev_kv"))

        return self._run(operation, lease_id, self._timeout_s)

    def revoke(self, lease_id: int) -> None:
        """The lease and every key under it are gone, unless etcd stays out of reach for 1.5 s."""

        def operation(connection: Connection, timeout_s: float) -> None:
            request = connection.rpc.LeaseRevokeRequest(ID=lease_id)
            connection.call(connection.leases.LeaseRevoke, request, timeout_s)

        with contextlib.suppress(LeaseGone):
            self._run(operation, lease_id, _REVOKE_TIMEOUT_S)

    def close(self) -> None:
        """The connection is gone."""
        self._failover.close()

    def _run(self, operation: Callable[[Connection, float], T], lease_id: int, timeout_s: float) -> T:
        try:
            return self._failover.run(operation, timeout_s=timeout_s)
        except grpc.RpcError as error:
            if is_lease_gone(error):
                raise LeaseGone(f"lease {lease_id:x} is not known") from error
            raise
