"""From Hydra's tree to typed objects, once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dejavu.config.apply import given_keys
from dejavu.config.schema import Config, WorkflowName
from dejavu.errors import ConfigError

SCHEMA_NAME = "schema"


def register_schema() -> None:
    """Hydra knows ``Config`` under the name that ``conf/config.yaml`` lists first. Idempotent."""
    ConfigStore.instance().store(name=SCHEMA_NAME, node=Config)


def load(cfg: DictConfig, directory: Path, overrides: Sequence[str] = ()) -> Config:
    """The typed declaration; its paths are absolute.

    Args:
        cfg: composed by Hydra over the schema, without the ``hydra`` node.
        directory: relative paths start here: the directory from which the user started the program.
        overrides: of the command line, for a workflow that must know what was given.

    Raises:
        ConfigError: an interpolation that does not resolve, or a value of the wrong type.
    """
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        key = error.full_key or "the configuration"
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error
    if not isinstance(config, Config):
        raise TypeError(f"the tree was not composed over the schema: {type(config).__name__}")
    make_paths_absolute(config, directory)
    if config.workflow.name is WorkflowName.apply:
        config.apply.given = given_keys(overrides)
    return config


def make_paths_absolute(config: Config, directory: Path) -> None:
    """Every path of ``config`` is absolute, in place; ``~`` is the user's home."""
    config.model.path = _absolute(config.model.path, directory)
    config.strategy.stream_folder = _absolute(config.strategy.stream_folder, directory)
    config.workload.path = _absolute(config.workload.path, directory)
    config.serve.tls_cert = _absolute(config.serve.tls_cert, directory)
    config.serve.tls_key = _absolute(config.serve.tls_key, directory)
    config.bench.ca_cert = _absolute(config.bench.ca_cert, directory)
    config.profile.path = _absolute(config.profile.path, directory)
    store = config.store
    store.ca_cert = _absolute(store.ca_cert, directory)
    store.cert = _absolute(store.cert, directory)
    store.key = _absolute(store.key, directory)


def _absolute(path: str | None, directory: Path) -> str | None:
    if path is None:
        return None
    return str((directory / Path(path).expanduser()).absolute())
