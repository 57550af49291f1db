"""What arrives at a process: control messages for its main thread, KV for its landing thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeAlias

import msgspec

from dejavu.control.plan import Plan
from dejavu.engine.messages import CONTROL, AnyMessage, decode
from dejavu.engine.peers import CONTROLLER
from dejavu.ids import Epoch, RowId, WorkerName
from dejavu.kv.chunk import ChunkHeader
from dejavu.transport.base import Hello, Inbound

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A control message and its bytes; ``inbound.release()`` when the payload is done with."""

    message: AnyMessage
    inbound: Inbound


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsLanded:
    """These rows' KV is whole in this stage's host memory."""

    row_ids: tuple[RowId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsSpoilt:
    """These rows' KV could not be sent, and why."""

    row_ids: tuple[RowId, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksSpoilt:
    """Chunks from ``peer`` were not what their headers say."""

    peer: str
    chunks: tuple[ChunkHeader, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost:
    """An inbound link ended, or a send to the peer failed."""

    peer: str
    reason: str
    epoch: Epoch
    """Of the link: one that ends in a later epoch is no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """Somebody outside wants the main thread to look up (a signal, a timer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFenced:
    """A new plan is in force: nothing of the old epoch is taken any more. For the controller."""

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFormed:
    """Every worker of the plan serves in its epoch and can be linked to. For the controller."""

    plan: Plan
    addresses: Mapping[WorkerName, str]


Event: TypeAlias = Received | RowsLanded | RowsSpoilt | ChunksSpoilt | PeerLost | Wake | ClusterFenced | ClusterFormed


class Mailbox:
    """The transport's ``Handler``: checks who may connect, sorts what they send, never blocks.

    Args:
        cluster: only peers of this cluster are admitted.
        epoch: the epoch in force, or None while this process has no plan yet (peers are asked to come again).
        fingerprint: the KV layout that peers must share; a peer with an empty one holds no KV.
    """

    def __init__(self, *, cluster: str, epoch: Callable[[], Epoch | None], fingerprint: Callable[[], str]) -> None:
        self._cluster = cluster
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._events: SimpleQueue[Event] = SimpleQueue()
        self.kv: SimpleQueue[Inbound | None] = SimpleQueue()
        self.num_stale = 0
        self._num_leads = 0
        self._held: list[Inbound] | None = None

    def post(self, event: Event) -> None:
        """The main thread will see the event. Any thread."""
        self._events.put(event)

    def take(self, timeout_s: float) -> Event | None:
        """The next event, or None after ``timeout_s`` seconds; 0 does not wait."""
        while True:
            try:
                event = self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
            except Empty:
                return None
            if not self._is_overtaken(event):
                return event

    def forget(self) -> None:
        """Events that were posted in an epoch that is over are gone; what somebody outside said stays."""
        kept = []
        while (event := self.take(0.0)) is not None:
            if isinstance(event, Wake):
                kept.append(event)
            elif isinstance(event, Received):
                event.inbound.release()
        for event in kept:
            self._events.put(event)

    def hold(self, is_held: bool) -> None:
        """While held, messages wait outside; then they come in their order. For injected partitions. Any thread."""
        held, self._held = self._held, [] if is_held else None
        for message in held or ():
            self.received(message)

    def admit(self, hello: Hello) -> str | None:
        """None, or why the peer is refused: both values are named."""
        epoch, fingerprint = self._epoch(), self._fingerprint()
        if hello.cluster != self._cluster:
            return f"this is cluster {self._cluster!r}, not {hello.cluster!r}"
        if epoch is None:
            return "no plan in force here yet"
        if hello.epoch != epoch:
            return f"epoch {hello.epoch} is not in force here; {epoch} is"
        if hello.fingerprint and fingerprint and hello.fingerprint != fingerprint:
            return f"KV layouts differ: here {fingerprint}; {hello.name} has {hello.fingerprint}"
        self._num_leads += hello.name == CONTROLLER
        logger.info("%s (incarnation %s) is connected", hello.name, hello.incarnation)
        return None

    def is_led(self) -> bool:
        """Whether a link from a controller is up. Any thread."""
        return self._num_leads > 0

    def received(self, message: Inbound) -> None:
        """The message is in the queue of its kind; a stale or unreadable one is dropped and counted."""
        if self._held is not None:
            self._held.append(message)
            return
        if message.header[:1] != CONTROL:
            self.kv.put(message)
            return
        try:
            decoded = decode(message.header)
        except msgspec.DecodeError as error:
            logger.error("unreadable message from %s dropped: %s", message.hello.name, error)
            message.release()
            return
        epoch = self._epoch()
        if epoch is not None and decoded.epoch != epoch:
            self.num_stale += 1
            logger.info("message of epoch %s from %s dropped", decoded.epoch, message.hello.name)
            message.release()
            return
        self._events.put(Received(message=decoded, inbound=message))

    def lost(self, hello: Hello, reason: str) -> None:
        """The main thread will see that the peer's link is gone."""
        self._num_leads -= hello.name == CONTROLLER
        self._events.put(PeerLost(peer=hello.name, reason=reason, epoch=Epoch(hello.epoch)))

    def _is_overtaken(self, event: Event) -> bool:
        """Whether the event belongs to an epoch that ended while it waited here."""
        epoch = self._epoch()
        if isinstance(event, PeerLost):
            return epoch is not None and event.epoch != epoch
        if isinstance(event, Received) and epoch is not None and event.message.epoch != epoch:
            self.num_stale += 1
            event.inbound.release()
            return True
        return False
