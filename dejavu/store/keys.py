"""The names of everything that a cluster keeps in etcd (``etcdctl get --prefix /dejavu/`` shows them)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dejavu.errors import ConfigError
from dejavu.ids import WorkerName

ALL_CLUSTERS = "/dejavu/"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one cluster. Raises ConfigError on a name that would make them ambiguous."""

    cluster: str

    def __post_init__(self) -> None:
        if not _NAME.match(self.cluster):
            raise ConfigError(f"cluster name {self.cluster!r}: use letters, digits, '.', '_' and '-' only")

    @property
    def prefix(self) -> str:
        """Everything of this cluster lies under it; it ends with a slash, so no other cluster's name matches."""
        return f"{ALL_CLUSTERS}{self.cluster}/"

    @property
    def spec(self) -> str:
        """The declared state."""
        return self.prefix + "spec"

    @property
    def plan(self) -> str:
        """The plan in force, with its epoch."""
        return self.prefix + "plan"

    @property
    def controller(self) -> str:
        """Who leads; on a lease."""
        return self.prefix + "controller"

    @property
    def status(self) -> str:
        """Conditions for people."""
        return self.prefix + "status"

    @property
    def workers_prefix(self) -> str:
        """All workers lie under it."""
        return self.prefix + "workers/"

    def worker(self, name: str) -> str:
        """One worker's registration; on a lease."""
        return self.workers_prefix + name

    def worker_of(self, key: str) -> WorkerName | None:
        """The worker whose registration ``key`` is, or None when it is another key."""
        name = key.removeprefix(self.workers_prefix)
        return WorkerName(name) if name != key and name and "/" not in name else None

    @property
    def acks_prefix(self) -> str:
        """All acknowledgements lie under it."""
        return self.prefix + "acks/"

    def acks(self, pipeline: str, stage: int) -> str:
        """The last finished step of each microbatch at one stage."""
        return f"{self.acks_prefix}{pipeline}/{stage}"

    @property
    def repairs_prefix(self) -> str:
        """All repair journals lie under it."""
        return self.prefix + "repairs/"

    def repairs(self, n: int) -> str:
        """The journal of the n-th repair."""
        return f"{self.repairs_prefix}{n}"

    @property
    def changes_prefix(self) -> str:
        """All changes of the declared state lie under it."""
        return self.prefix + "changes/"

    def changes(self, revision: int) -> str:
        """What became of the declared state of that revision."""
        return f"{self.changes_prefix}{revision}"

    def change_of(self, key: str) -> int | None:
        """The revision whose change ``key`` is, or None when it is another key."""
        return _number_after(self.changes_prefix, key)

    def repair_of(self, key: str) -> int | None:
        """The number of the repair whose journal ``key`` is, or None when it is another key."""
        return _number_after(self.repairs_prefix, key)


def _number_after(prefix: str, key: str) -> int | None:
    number = key.removeprefix(prefix)
    return int(number) if number != key and number.isascii() and number.isdecimal() else None
