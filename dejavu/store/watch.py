"""Changes under a prefix, in order and without gaps, through anything that etcd goes through.

Each attempt opens a watch stream behind the revision that was last known, and then reads the prefix *as it stood
at that revision*. When that equals what was delivered so far, the stream continues our history. Otherwise (etcd was
wiped and perhaps grown again, or has compacted that revision) the prefix is listed and the difference is delivered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import grpc

from dejavu.errors import DejavuError
from dejavu.store.client import list_prefix
from dejavu.store.connection import Connection
from dejavu.store.entry import Entry, Snapshot, entry_of, prefix_end
from dejavu.store.faults import StoreUnavailable, is_history_gone
from dejavu.store.spec import StoreSpec

logger = logging.getLogger(__name__)

_PROBE_PERIOD_S = 1.0
_CALL_TIMEOUT_S = 1.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_STOP_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one revision changed under the prefix, or what a listing found changed."""

    revision: int
    puts: tuple[Entry, ...]
    deletes: tuple[str, ...]


class PrefixWatch:
    """Calls ``on_change`` from a thread of its own for every change under ``prefix``, until ``stop``.

    The first change is a full listing as puts (without any when there is nothing yet). Later ones come once each, in
    the order of revisions; only when etcd has lost the history in between (wiped, or compacted during an outage) do
    they come as one change that leads from the old state to the new, and its revision may then be lower.
    ``on_change`` should return soon; what it raises is logged and does not end the watch.
    """

    def __init__(self, spec: StoreSpec, prefix: str, on_change: Callable[[Change], None]) -> None:
        self._spec = spec
        self._prefix = prefix
        self._on_change = on_change
        self._known: dict[str, Entry] = {}
        self._revision: int | None = None
        self._listed = False
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._connection: Connection | None = None
        self._failures = 0
        self._attempts = 0
        self._watcher = threading.Thread(target=self._watch, name=f"watch {prefix}", daemon=True)
        self._prober = threading.Thread(target=self._probe, name=f"watch-probe {prefix}", daemon=True)
        self._watcher.start()
        self._prober.start()

    def stop(self) -> None:
        """No further call of ``on_change`` starts and both threads have ended, at most 3 s later. Idempotent."""
        self._stopping.set()
        self._drop_connection()
        for thread in (self._watcher, self._prober):
            if thread is not threading.current_thread():
                thread.join(_STOP_TIMEOUT_S)

    def _watch(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            endpoint = self._spec.endpoints[self._attempts % len(self._spec.endpoints)]
            self._attempts += 1
            try:
                self._follow(self._connect(endpoint))
            except DejavuError as error:
                self._failures += 1
                if not self._stopping.is_set():
                    # Once an outage: it may last for hours and is tried every second.
                    level = logging.WARNING if self._failures == 1 else logging.DEBUG
                    logger.log(level, "watch of %s is interrupted, trying again: %s", self._prefix, error)
            finally:
                self._drop_connection()
            pause_s = _FIRST_PAUSE_S if self._failures <= 1 else min(2 * pause_s, _LONGEST_PAUSE_S)
            self._stopping.wait(pause_s)

    def _follow(self, connection: Connection) -> None:
        """Changes were delivered until the stream broke (StoreUnavailable) or our history turned out to be void."""
        if self._revision is None:
            self._catch_up(list_prefix(connection, self._prefix, _CALL_TIMEOUT_S))
        try:
            for response in self._open_stream(connection):
                if self._stopping.is_set():
                    return
                if response.canceled:
                    self._cancelled(response, connection)
                    return
                if response.created:
                    if not self._history_holds(connection):
                        self._revision = None
                        return
                    self._recovered(connection)
                    continue
                self._deliver_events(response)
        except grpc.RpcError as error:
            raise connection.translated(error) from error

    def _open_stream(self, connection: Connection) -> Any:
        assert self._revision is not None, "a stream continues a listing"
        prefix = self._prefix.encode()
        create = connection.rpc.WatchCreateRequest(
            key=prefix,
            range_end=prefix_end(prefix),
            start_revision=self._revision + 1,
            progress_notify=True,
        )
        request = connection.rpc.WatchRequest(create_request=create)
        # A member that has lost its leader ends such a stream instead of keeping it silent.
        return connection.stream(connection.watches.Watch, request, (("hasleader", "true"),), _CALL_TIMEOUT_S)

    def _history_holds(self, connection: Connection) -> bool:
        """True when etcd's past is the one that was delivered.

        Asked after the stream was opened: a server that was exchanged in between would have broken the stream.
        """
        assert self._revision is not None, "a stream continues a listing"
        try:
            past = list_prefix(connection, self._prefix, _CALL_TIMEOUT_S, revision=self._revision)
        except grpc.RpcError as error:
            if is_history_gone(error):
                return False
            raise
        return {entry.key: entry for entry in past.entries} == self._known

    def _cancelled(self, response: Any, connection: Connection) -> None:
        """After a compaction the watch will start from a listing. Raises StoreUnavailable for any other reason."""
        if response.compact_revision:
            self._revision = None
            return
        reason = response.cancel_reason or "no reason given"
        raise StoreUnavailable(f"etcd at {connection.endpoint} cancelled the watch of {self._prefix}: {reason}")

    def _recovered(self, connection: Connection) -> None:
        if self._failures:
            logger.info("watch of %s goes on at %s", self._prefix, connection.endpoint)
        self._failures = 0

    def _deliver_events(self, response: Any) -> None:
        """One change for each revision in the response."""
        for revision, events in groupby(response.events, key=lambda event: int(event.kv.mod_revision)):
            puts: list[Entry] = []
            deletes: list[str] = []
            for event in events:
                if event.type == event.PUT:
                    puts.append(entry_of(event.kv))
                else:
                    deletes.append(event.kv.key.decode())
            self._deliver(Change(revision=revision, puts=tuple(puts), deletes=tuple(deletes)))
        if not response.events:
            # A progress notification: nothing happened up to its revision. (Beside events, the revision in the
            # header may be ahead of events that are still to come.)
            self._revision = int(response.header.revision)

    def _catch_up(self, now: Snapshot) -> None:
        """What differs between the known state and ``now`` was delivered."""
        present = {entry.key: entry for entry in now.entries}
        change = Change(
            revision=now.revision,
            puts=tuple(entry for entry in now.entries if self._known.get(entry.key) != entry),
            deletes=tuple(sorted(self._known.keys() - present.keys())),
        )
        if change.puts or change.deletes or not self._listed:
            self._deliver(change)
        self._listed = True
        self._revision = now.revision

    def _deliver(self, change: Change) -> None:
        for entry in change.puts:
            self._known[entry.key] = entry
        for key in change.deletes:
            self._known.pop(key, None)
        self._revision = change.revision
        if self._stopping.is_set():
            return
        try:
            self._on_change(change)
        except Exception:
            # A fault of the receiver must not leave it with a watch that looks alive and is silent.
            logger.exception("the receiver of %s failed on revision %d", self._prefix, change.revision)

    def _probe(self) -> None:
        """Breaks the stream of a member that does not answer: a frozen one keeps its connections open and silent."""
        while not self._stopping.wait(_PROBE_PERIOD_S):
            with self._lock:
                connection = self._connection
            if connection is None:
                continue
            request = connection.rpc.RangeRequest(key=self._prefix.encode(), count_only=True)
            try:
                connection.call(connection.kv.Range, request, _CALL_TIMEOUT_S)
            except DejavuError:
                connection.close()

    def _connect(self, endpoint: str) -> Connection:
        connection = Connection(self._spec, endpoint)
        with self._lock:
            self._connection = connection
        if self._stopping.is_set():
            # stop() may have looked before this connection was there.
            connection.close()
        return connection

    def _drop_connection(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
