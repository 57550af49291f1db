"""What lies between the processes of a cluster in one process: a network that can be tapped, held and cut."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeAlias

from dejavu.control.plan import Plan
from dejavu.engine.mailbox import Event, Mailbox, PeerLost, Wake
from dejavu.engine.messages import CONTROL
from dejavu.engine.peers import Peers
from dejavu.ids import Epoch, IncarnationId
from dejavu.transport.base import Buffer, Hello, Link
from dejavu.transport.local import LocalNetwork, LocalTransport

CLUSTER = "in-process"
SECRET = "only for tests"
CLOSE_TIMEOUT_S = 5.0
DEADLINE_S = 60.0
"""Far beyond any run of these tests: a hang becomes an error that says so."""

Tap: TypeAlias = Callable[[str, str, bytes, bytes], Iterable[tuple[bytes, bytes]]]
"""Gets (sender, peer, header, payload) of a message about to leave; gives the messages that leave in its place.

It may raise ``Killed``: these workers die now.
"""


class Killed(BaseException):
    """These workers are dead. A message that one of them was about to send does not leave."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.names = names


class Wire:
    """What lies between the processes: the network, and who listens in."""

    def __init__(self, tap: Tap | None, on_killed: Callable[[Sequence[str]], None]) -> None:
        self.network = LocalNetwork()
        self.tap = tap
        self.on_killed = on_killed
        self.lock = threading.RLock()


class Gate:
    """The way out of one process; while it is shut, messages wait in it. To their sender they have left."""

    def __init__(self) -> None:
        self.is_shut = False
        self.is_dead = False
        self._held: list[tuple[Link, bytes, bytes]] = []

    def hold(self, link: Link, header: bytes, payload: bytes) -> None:
        """The message leaves when the gate opens."""
        self._held.append((link, header, payload))

    def open(self) -> int:
        """What waited has left, over the links of its time. Returns how many messages."""
        self.is_shut, held, self._held = False, self._held, []
        for link, header, payload in held:
            link.send(header, (memoryview(payload),) if payload else ())
        return len(held)


class TappedLink:
    """A link whose messages go through a tap and a gate."""

    def __init__(self, link: Link, sender: str, wire: Wire, gate: Gate) -> None:
        self._link, self._sender, self._wire, self._gate = link, sender, wire, gate
        self.peer, self.address, self.description = link.peer, link.address, link.description

    @property
    def alive(self) -> bool:
        return self._link.alive

    def send(self, header: bytes, payload: Sequence[Buffer] = (), *, timeout_s: float = 60.0) -> Future[None]:
        if self._wire.tap is None and not self._gate.is_shut:
            return self._link.send(header, payload, timeout_s=timeout_s)
        # The tap took a copy; what it keeps back has left, as far as the sender knows.
        sent: Future[None] = Future()
        sent.set_result(None)
        with self._wire.lock:
            whole = b"".join(payload)
            for new_header, new_payload in self._tapped(header, whole):
                if self._gate.is_shut:
                    self._gate.hold(self._link, new_header, new_payload)
                else:
                    parts = (memoryview(new_payload),) if new_payload else ()
                    sent = self._link.send(new_header, parts, timeout_s=timeout_s)
        return sent

    def close(self, timeout_s: float = 10.0) -> None:
        self._link.close(timeout_s)

    def abort(self) -> None:
        self._link.abort()

    def _tapped(self, header: bytes, payload: bytes) -> Iterable[tuple[bytes, bytes]]:
        if self._wire.tap is None or self._gate.is_dead:
            return [(header, payload)]
        try:
            return list(self._wire.tap(self._sender, self.peer, header, payload))
        except Killed as killed:
            self._wire.on_killed(killed.names)
            if self._sender not in killed.names:
                return [(header, payload)]
            if header[:1] != CONTROL:
                return []  # KV leaves on a thread that knows nothing of deaths.
            raise


class TappedTransport(LocalTransport):
    """A local transport whose outgoing links are tapped."""

    def __init__(self, sender: str, wire: Wire, gate: Gate) -> None:
        super().__init__(wire.network, SECRET)
        self._sender, self._wire, self._gate = sender, wire, gate

    def connect(self, address: str, hello: Hello, *, peer: str, timeout_s: float = 10.0) -> TappedLink:  # type: ignore[override]
        link = super().connect(address, hello, peer=peer, timeout_s=timeout_s)
        return TappedLink(link, self._sender, self._wire, self._gate)


class MortalMailbox(Mailbox):
    """A mailbox that ends its reader once its process is dead."""

    gate: Gate | None = None

    def take(self, timeout_s: float) -> Event | None:
        event = super().take(timeout_s)
        if self.gate is not None and self.gate.is_dead:
            raise Killed
        return event


class Node:
    """A name on the network with a mailbox and links: a worker's or the controller's end."""

    def __init__(self, name: str, incarnation: str, wire: Wire, *, holds_kv: bool) -> None:
        self.name = name
        self.incarnation = IncarnationId(incarnation)
        self.gate = Gate()
        self.plan: Plan | None = None
        self.peers: Peers | None = None
        self.transport = TappedTransport(name, wire, self.gate)
        self.mailbox = MortalMailbox(
            cluster=CLUSTER,
            epoch=lambda: None if self.plan is None else self.plan.epoch,
            fingerprint=lambda: "" if self.plan is None or not holds_kv else self.plan.model.layout.fingerprint,
        )
        self.mailbox.gate = self.gate
        self.address = self.transport.listen(self.mailbox)
        self._holds_kv = holds_kv

    def make_peers(self, plan: Plan) -> Peers:
        """Links of one epoch, none of them up yet."""
        fingerprint = plan.model.layout.fingerprint if self._holds_kv else ""
        hello = Hello(
            cluster=CLUSTER,
            name=self.name,
            incarnation=self.incarnation,
            epoch=plan.epoch,
            fingerprint=fingerprint,
        )
        self.peers = Peers(self.transport, hello, timeout_s=DEADLINE_S, on_failed=self._failed)
        return self.peers

    def die(self) -> None:
        """Nothing leaves any more, and peers see that the links are gone."""
        self.gate.is_dead = True
        if self.peers is not None:
            self.peers.abort()
        self.transport.close(CLOSE_TIMEOUT_S)
        self.mailbox.post(Wake())

    def close(self) -> None:
        if self.peers is not None:
            self.peers.close(CLOSE_TIMEOUT_S)
        self.transport.close(CLOSE_TIMEOUT_S)

    def _failed(self, peer: str, reason: str, epoch: Epoch) -> None:
        self.mailbox.post(PeerLost(peer=peer, reason=reason, epoch=epoch))
