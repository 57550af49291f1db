"""etcd: keys, client, watch, leases and the embedded server. Holds no decision of the cluster."""

from __future__ import annotations

from dejavu.store.client import StoreClient
from dejavu.store.embedded import EmbeddedEtcd
from dejavu.store.entry import Entry, Snapshot
from dejavu.store.faults import StoreRefused, StoreUnavailable
from dejavu.store.keys import Keys
from dejavu.store.lease import LeaseKeeper
from dejavu.store.spec import StoreSpec
from dejavu.store.watch import Change, PrefixWatch

__all__ = [
    "Change",
    "EmbeddedEtcd",
    "Entry",
    "Keys",
    "LeaseKeeper",
    "PrefixWatch",
    "Snapshot",
    "StoreClient",
    "StoreRefused",
    "StoreSpec",
    "StoreUnavailable",
]
