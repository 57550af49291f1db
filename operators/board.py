"""The cluster's keys in etcd, for the operator: reads with a client, writes on the controller's lease."""

from __future__ import annotations

import logging

import msgspec

from dejavu.clock import Clock
from dejavu.control.member import encode_json
from dejavu.engine.cluster_view import ControllerEntry
from dejavu.errors import ConfigError, Fatal
from dejavu.store.client import StoreClient
from dejavu.store.faults import StoreUnavailable
from dejavu.store.keys import Keys
from dejavu.store.lease import LeaseKeeper
from operators.observation import Observed, members_of
from operators.processes import Launcher

logger = logging.getLogger(__name__)

_CLAIM_PAUSE_S = 0.1


class StoreBoard:
    """Everything that this controller writes lies on its lease, so nothing of it outlives the controller."""

    def __init__(self, client: StoreClient, keeper: LeaseKeeper, keys: Keys) -> None:
        self._client = client
        self._keeper = keeper
        self._keys = keys
        self._was_reachable = True

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

    def observe(self, launcher: Launcher) -> Observed:
        """One look; members are None while the store cannot be read."""
        exits, running = launcher.exits(), launcher.running()
        try:
            snapshot = self._client.get_prefix(self._keys.prefix)
        except StoreUnavailable as error:
            if self._was_reachable:
                logger.warning("the store is away; requests go on without it: %s", error)
            self._was_reachable = False
            return Observed(members=None, plan=None, spec=None, running=running, exits=exits)
        if not self._was_reachable:
            logger.info("the store is back")
        self._was_reachable = True
        values = {entry.key: entry.value for entry in snapshot.entries}
        return Observed(
            members=members_of(snapshot, self._keys),
            plan=values.get(self._keys.plan),
            spec=values.get(self._keys.spec),
            running=running,
            exits=exits,
        )

    def put_spec(self, value: bytes) -> None:
        """The declared state will be in the store."""
        self._keeper.update(self._keys.spec, value)

    def put_plan(self, value: bytes) -> None:
        """The plan will be in the store."""
        logger.info("plan of epoch %s is put", msgspec.json.decode(value)["epoch"])
        self._keeper.update(self._keys.plan, value)

    def put_status(self, value: bytes) -> None:
        """The conditions will be in the store."""
        self._keeper.update(self._keys.status, value)
