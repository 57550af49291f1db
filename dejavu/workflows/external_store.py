"""The store of somebody else, as declared."""

from __future__ import annotations

from dejavu.config import StoreConfig
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
