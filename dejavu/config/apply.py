"""The shape of the section ``apply``, and what a declaration must satisfy for ``workflow=apply``. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dejavu.config.bounds import above_zero
from dejavu.errors import ConfigError

if TYPE_CHECKING:
    from dejavu.config.schema import Config

_ADDRESS = ("workflow", "store", "cluster.name")
"""Groups and keys that say where the cluster is, and not what of it is to change."""


@dataclass(kw_only=True)
class ApplyConfig:
    """How ``workflow=apply`` changes a cluster that runs. What is to change is given as its own keys."""

    timeout_s: float = 120.0
    """Until the operator must have brought the change into force, or refused it."""
    given: list[str] = field(default_factory=list)
    """The keys that the command line gives, which alone change. The command fills it in."""

    @property
    def wanted(self) -> list[str]:
        """Keys of the declared state that are to change, without those that say where the cluster is."""
        return [
            key for key in self.given if key not in _ADDRESS and not key.startswith(("store.", "workflow.", "apply."))
        ]


def given_keys(overrides: Sequence[str]) -> list[str]:
    """The keys and groups that a command line's overrides give, each once; not Hydra's own."""
    keys = [text.lstrip("+~").partition("=")[0] for text in overrides]
    return [key for key in dict.fromkeys(keys) if not key.startswith(("hydra.", "hydra/"))]


def check_apply(config: Config, *, is_applying: bool, is_external: bool) -> None:
    """The section makes sense, or there is none. Raises ConfigError naming key, value and limit."""
    apply = config.apply
    if not is_applying:
        if apply != ApplyConfig():
            raise ConfigError(f"apply is for workflow=apply, and the choice is workflow={config.workflow.name.value}")
        return
    above_zero("apply.timeout_s", apply.timeout_s, " s")
    if "apply.given" in apply.given:
        raise ConfigError("apply.given is filled in by the command: give the keys themselves")
    if not is_external:
        raise ConfigError(
            "workflow=apply changes a cluster that runs: store=external store.endpoints=[HOST:PORT]\n"
            "a run with a store of its own tells where it is when it starts"
        )
    if not apply.wanted:
        raise ConfigError(
            "workflow=apply changes the keys that it is given, such as strategy.in_flight=4, and got none"
        )
    groups = [key for key in apply.wanted if "." not in key]
    if groups:
        raise ConfigError(f"{groups[0]}: a group is not changed as a whole; give keys such as strategy.in_flight=4")
