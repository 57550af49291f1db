"""What an operator sees in one pass: the store's keys and the processes, taken at one moment."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from dejavu.control.member import Member, decode_member
from dejavu.ids import WorkerName
from dejavu.store.entry import Snapshot
from dejavu.store.keys import Keys

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """A worker process that this launcher owned has ended."""

    name: WorkerName
    status: int
    """Exit status; negative: the signal that ended it."""

    @property
    def text(self) -> str:
        """The status in words."""
        return f"killed by signal {-self.status}" if self.status < 0 else f"exit status {self.status}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One look at the cluster. ``members`` is None when the store could not be read: then nothing is known of them."""

    members: Mapping[WorkerName, Member] | None
    plan: bytes | None
    spec: bytes | None
    running: frozenset[WorkerName]
    """Worker processes of ours that have been started and have not ended."""
    exits: tuple[ProcessExit, ...] = field(default=())


def members_of(snapshot: Snapshot, keys: Keys) -> dict[WorkerName, Member]:
    """The registered workers; a value that is none of ours is left out and logged."""
    members: dict[WorkerName, Member] = {}
    for entry in snapshot.entries:
        if not entry.key.startswith(keys.workers_prefix):
            continue
        try:
            member = decode_member(entry.value)
        except msgspec.DecodeError as error:
            logger.warning("%s does not hold a worker: %s", entry.key, error)
            continue
        members[member.name] = member
    return members
