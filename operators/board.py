"""The cluster's keys in etcd, for the operator: reads with a client, writes on the controller's lease."""

from __future__ import annotations

import contextlib
import logging

import grpc

from dejavu.clock import Clock
from dejavu.control.member import encode_json
from dejavu.engine.cluster_view import ControllerEntry
from dejavu.errors import ConfigError, Fatal
from dejavu.store.client import StoreClient
from dejavu.store.faults import StoreUnavailable, is_lease_gone
from dejavu.store.keys import Keys
from dejavu.store.lease import LeaseKeeper
from operators.launcher import Launcher
from operators.observation import Observed, changes_of, journals_of, members_of

logger = logging.getLogger(__name__)

_CLAIM_PAUSE_S = 0.1


class StoreBoard:
    """Everything that this controller writes lies on its lease, so nothing of it outlives the controller.

    The status and its own key are the keeper's to put again. The declared state, the plan and the journals are not: the
    keeper writes late and unconditionally, and could put an old plan over a newer one, or a declared state over
    somebody's wish. They are written here, compare-and-swap, and a look that misses them has them put again.
    """

    def __init__(self, client: StoreClient, keeper: LeaseKeeper, keys: Keys) -> None:
        self._client = client
        self._keeper = keeper
        self._keys = keys
        self._was_reachable = True
        self._own_key: bytes | None = None
        self._incarnation: str | None = None

    def claim(self, entry: ControllerEntry, clock: Clock, *, lease_ttl_s: float) -> None:
        """This process is the cluster's only controller. Waits for the lease of one that has died.

        Raises ConfigError when another controller lives, Fatal when there is no lease to claim it with.
        """
        if not self._keeper.wait_held(lease_ttl_s + 10.0):
            raise Fatal("the store grants no lease")
        deadline_s = clock.monotonic() + lease_ttl_s + 2.0
        value = encode_json(entry)
        while not self._client.put_if(self._keys.controller, value, 0, lease_id=self._keeper.lease_id):
            if clock.monotonic() >= deadline_s:
                holder = self._client.get(self._keys.controller)
                raise ConfigError(
                    f"cluster.name={self._keys.cluster}: the store has a living controller of that name\n"
                    f"{holder.value.decode(errors='replace') if holder is not None else ''}\n"
                    "choose another cluster.name, or stop that one"
                )
            clock.sleep(_CLAIM_PAUSE_S)
        self._keeper.update(self._keys.controller, value)
        self._own_key, self._incarnation = value, entry.incarnation

    def observe(self, launcher: Launcher) -> Observed:
        """One look; members are None while the store cannot be read."""
        exits, running, pids, is_ending = launcher.exits(), launcher.running(), launcher.pids(), launcher.is_stopping()
        try:
            snapshot = self._client.get_prefix(self._keys.prefix)
        except StoreUnavailable as error:
            if self._was_reachable:
                logger.warning("the store is away; requests go on without it: %s", error)
            self._was_reachable = False
            # The try took its time, and processes can be seen without a store.
            return Observed(
                members=None,
                plan=None,
                spec=None,
                running=launcher.running(),
                exits=launcher.exits(),
                pids=launcher.pids(),
                is_ending=launcher.is_stopping(),
            )
        if not self._was_reachable:
            logger.info("the store is back")
        self._was_reachable = True
        values = {entry.key: entry.value for entry in snapshot.entries}
        return Observed(
            members=members_of(snapshot, self._keys, self._incarnation),
            plan=values.get(self._keys.plan),
            spec=values.get(self._keys.spec),
            running=running,
            exits=exits,
            pids=pids,
            is_ending=is_ending,
            own_key_present=self._own_key is None or values.get(self._keys.controller) == self._own_key,
            losses=self._keeper.losses,
            journals=journals_of(snapshot, self._keys),
            changes=changes_of(snapshot, self._keys),
        )

    def put_spec(self, previous: bytes | None, value: bytes) -> None:
        """The declared state is in the store if that had ``previous`` (None: none), or the next look tries again."""
        self._swap(self._keys.spec, previous, value)

    def put_plan_if(self, previous: bytes | None, value: bytes) -> bool | None:
        """True: the store had ``previous`` (None: no plan) and has this plan now. False: it has something else.

        None: the store did not answer, or the lease is being granted anew; whether the plan is in shows the next look.
        """
        return self._swap(self._keys.plan, previous, value)

    def put_journal(self, number: int, value: bytes) -> None:
        """The journal of that repair is in the store, or the next look tries again."""
        self._put(self._keys.repairs(number), value)

    def drop_journal(self, number: int) -> None:
        """The journal of that repair is not in the store, or the next look tries again."""
        self._drop(self._keys.repairs(number))

    def put_change(self, revision: int, value: bytes) -> None:
        """What became of that revision is in the store, or the next look tries again."""
        self._put(self._keys.changes(revision), value)

    def drop_change(self, revision: int) -> None:
        """What became of that revision is not in the store, or the next look tries again."""
        self._drop(self._keys.changes(revision))

    def put_status(self, value: bytes) -> None:
        """The conditions will be in the store."""
        self._keeper.update(self._keys.status, value)

    def _put(self, key: str, value: bytes) -> None:
        try:
            entry = self._client.get(key)
        except StoreUnavailable:
            return
        self._swap(key, None if entry is None else entry.value, value)

    def _drop(self, key: str) -> None:
        with contextlib.suppress(StoreUnavailable):
            self._client.delete(key)

    def _swap(self, key: str, previous: bytes | None, value: bytes) -> bool | None:
        try:
            entry = self._client.get(key)
            if (None if entry is None else entry.value) != previous:
                return False
            revision = 0 if entry is None else entry.mod_revision
            return self._client.put_if(key, value, revision, lease_id=self._keeper.lease_id)
        except StoreUnavailable as error:
            logger.warning("%s could not be put: %s", key, error)
        except grpc.RpcError as error:
            if not is_lease_gone(error):
                raise
            logger.warning("%s could not be put: this controller's lease has run out", key)
        return None
