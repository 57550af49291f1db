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
class Moment:
    """The time of a look by both clocks: waiting is measured by the monotonic one, people are told the wall's."""

    monotonic_s: float
    wall_s: float

    def ago(self, then_s: float) -> float:
        """The wall-clock time of a moment that the monotonic clock called ``then_s``."""
        return self.wall_s - (self.monotonic_s - then_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """A worker process that this launcher owned has ended."""

    name: WorkerName
    status: int
    """Exit status; negative: the signal that ended it."""
    pid: int
    at_s: float
    """Wall-clock time of its end."""

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
    """Workers whose newest process of ours was started and has not ended."""
    exits: tuple[ProcessExit, ...] = field(default=())
    """Ends that nobody asked for, of the whole run, oldest first."""
    pids: Mapping[WorkerName, int] = field(default_factory=dict)
    """The newest process of each worker that was started, whether it runs or not."""
    is_ending: bool = False
    """The run is over: processes end because they were asked to."""
    own_key_present: bool = True
    """False when the store does not have this controller's own key: it has lost more than a worker."""
    losses: int = 0
    """How often this controller's own lease was lost so far."""
    journals: Mapping[int, bytes] = field(default_factory=dict)
    """Repair journals in the store."""
    changes: Mapping[int, bytes] = field(default_factory=dict)
    """Changes of the declared state in the store, by its revision."""


def members_of(snapshot: Snapshot, keys: Keys, leader: str | None = None) -> dict[WorkerName, Member]:
    """The registered workers; a value that is none of ours is left out and logged.

    Left out, too, are those that serve another controller than ``leader``: they were another run's, and will end.
    """
    members: dict[WorkerName, Member] = {}
    for entry in snapshot.entries:
        if not entry.key.startswith(keys.workers_prefix):
            continue
        try:
            member = decode_member(entry.value)
        except msgspec.DecodeError as error:
            logger.warning("%s does not hold a worker: %s", entry.key, error)
            continue
        if leader is None or member.leader in (None, leader):
            members[member.name] = member
    return members


def journals_of(snapshot: Snapshot, keys: Keys) -> dict[int, bytes]:
    """The repair journals by number; a key that is none of ours is left out."""
    numbered = ((keys.repair_of(entry.key), entry.value) for entry in snapshot.entries)
    return {number: value for number, value in numbered if number is not None}


def changes_of(snapshot: Snapshot, keys: Keys) -> dict[int, bytes]:
    """The changes of the declared state by revision; a key that is none of ours is left out."""
    numbered = ((keys.change_of(entry.key), entry.value) for entry in snapshot.entries)
    return {revision: value for revision, value in numbered if revision is not None}
