"""The declared state of a cluster as its store has it: what the user declared, and how often that was changed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from dejavu.config.cluster import ClusterConfig
from dejavu.config.schema import Config, ModelConfig, TransportConfig
from dejavu.config.strategy import StrategyConfig
from dejavu.config.validation import check_num_workers, check_strategy
from dejavu.errors import ConfigError

FIRST_REVISION = 1


@dataclass(kw_only=True)
class DeclaredState:
    """The JSON value of ``/dejavu/<cluster>/spec``: everything but the secret and the store's credentials."""

    revision: int = FIRST_REVISION
    """It grows by one with every change while the cluster runs."""
    cluster: ClusterConfig
    model: ModelConfig
    strategy: StrategyConfig
    transport: TransportConfig


def declared_state(config: Config) -> DeclaredState:
    """What is declared of the cluster that starts, without its secret."""
    cluster = replace(config.cluster, secret=None)
    return DeclaredState(cluster=cluster, model=config.model, strategy=config.strategy, transport=config.transport)


def read_declared(value: bytes) -> DeclaredState:
    """The declared state of a key's value, with a strategy that makes sense by itself.

    Raises ConfigError naming what does not.
    """
    try:
        state = msgspec.json.decode(value, type=DeclaredState)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the declared state cannot be read: {error}") from error
    check_strategy(state.strategy)
    check_num_workers(state.cluster, state.strategy)
    return state


def value_at(config: object, key: str) -> object:
    """The value at a dotted key of a declaration."""
    found = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def put_at(config: object, key: str, value: object) -> None:
    """The dotted key of a declaration has the value."""
    *path, name = key.split(".")
    owner = value_at(config, ".".join(path)) if path else config
    setattr(owner, name, value)
