"""What a declaration must satisfy for ``workflow=status``, which reads the store of a cluster that runs. Pure."""

from __future__ import annotations

from dejavu.config.schema import Config, StoreKind, WorkflowName
from dejavu.errors import ConfigError


def check_status(config: Config) -> None:
    """There is a store to read, or another workflow was chosen. Raises ConfigError."""
    if config.workflow.name is WorkflowName.status and config.store.kind is StoreKind.embedded:
        raise ConfigError(
            "workflow=status reads the store of a cluster that runs: store=external store.endpoints=[HOST:PORT]\n"
            "a run with a store of its own tells where it is when it starts"
        )
