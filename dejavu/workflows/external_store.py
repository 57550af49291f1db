"""The store of somebody else, as declared."""

from __future__ import annotations

from dejavu.config import StoreConfig
from dejavu.control.standing import clusters_of
from dejavu.errors import ConfigError, nearest
from dejavu.store.client import StoreClient
from dejavu.store.keys import ALL_CLUSTERS, Keys
from dejavu.store.spec import StoreSpec


def external_store(config: StoreConfig) -> StoreSpec:
    """Where the declared external store is and how to be let in. Raises ConfigError on values that cannot work."""
    return StoreSpec(
        endpoints=tuple(config.endpoints),
        ca_cert=config.ca_cert,
        cert=config.cert,
        key=config.key,
        user=config.user,
        password=config.password,
        timeout_s=config.timeout_s,
    )


def unknown_cluster(client: StoreClient, keys: Keys) -> ConfigError:
    """The error that a store has nothing of the cluster; it names those that there are."""
    names = clusters_of([entry.key for entry in client.get_prefix(ALL_CLUSTERS).entries])
    hint = nearest(keys.cluster, names) if names else "it holds no cluster at all: a cluster's keys go when it ends"
    return ConfigError(f"cluster.name={keys.cluster}: the store has no such cluster\n{hint}")
