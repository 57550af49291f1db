"""A worker of a cluster in one process: an engine on a thread of its own, in one epoch after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from dejavu.clock import SystemClock
from dejavu.control.plan import Place, Plan
from dejavu.engine.build import BuiltStage, Surroundings, build_stage, load_stage, load_whole, new_kept
from dejavu.engine.mailbox import Wake
from dejavu.engine.peers import CONTROLLER, Peers
from dejavu.errors import Fatal
from dejavu.ids import Epoch, IncarnationId, WorkerName
from dejavu.transport.base import TransportError

from harness.local_wire import CLOSE_TIMEOUT_S, CLUSTER, Killed, Node

_CONNECT_TIMEOUT_S = 2.0
_LOOK_S = 0.05
T = TypeVar("T")


class _Superseded(Exception):
    """A newer plan is in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What a worker says of itself."""

    incarnation: IncarnationId
    address: str
    state: str = "starting"
    epoch: Epoch | None = None


@dataclass(slots=True)
class Board:
    """In the place of the store: the plan, who is registered, what is acknowledged."""

    plan: Plan | None = None
    members: dict[str, Registered] = field(default_factory=dict)
    acks: dict[tuple[str, int], list[bytes]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def register(self, name: str, entry: Registered, *, over: Callable[[Registered], bool] = lambda _: True) -> None:
        """The entry is on the board, unless ``over`` refuses to let it replace the one that is there."""
        with self.changed:
            before = self.members.get(name)
            if before is None or over(before):
                self.members[name] = entry
            self.changed.notify_all()

    def acknowledge(self, pipeline: str, stage: int, value: bytes) -> None:
        """The value is the newest of its key."""
        with self.changed:
            self.acks.setdefault((pipeline, stage), []).append(value)


class Worker:
    """One incarnation of a worker: what ``dejavu.worker`` does, on a thread and with a board for a store."""

    def __init__(self, node: Node, board: Board, controller_address: str, kv_folder: Path | None) -> None:
        self.node = node
        self.problem: BaseException | None = None
        self.stage: BuiltStage | None = None
        self.kept = new_kept(SystemClock())
        self.is_blind = False
        """True while it does not hear of new plans."""
        self._board = board
        self._controller_address = controller_address
        self._kv_folder = None if kv_folder is None else kv_folder / node.name
        self._stop_asked = threading.Event()
        self._served: Epoch | None = None
        self.thread = threading.Thread(target=self._run, name=f"engine-{node.name}-{node.incarnation}", daemon=True)
        self._register("starting")

    @property
    def name(self) -> WorkerName:
        return WorkerName(self.node.name)

    def ask_to_stop(self) -> None:
        self._stop_asked.set()
        self.look_up()

    def look_up(self) -> None:
        """The main thread sees what is new."""
        self.node.mailbox.post(Wake())
        with self._board.changed:
            self._board.changed.notify_all()

    def die(self) -> None:
        """The process is gone, as its peers see it; its thread will end."""
        self.node.die()
        with self._board.changed:
            self._board.changed.notify_all()

    def _run(self) -> None:
        torch.set_num_threads(1)
        try:
            while (plan := self._wait_for(self._next_plan)) is not None:
                self._enter(plan)
        except Killed:
            pass
        except BaseException as error:  # Whatever ends an engine must reach the test.
            if not self.node.gate.is_dead:
                self.problem = error
        with self._board.changed:
            self._board.changed.notify_all()

    def _enter(self, plan: Plan) -> None:
        place = plan.place_of(self.name)
        if place is None:
            load_whole(plan, self.kept)
            self._register("ready")
        else:
            load_stage(plan, place, self.kept)
            self._serve_epoch(plan, place)
        self._served = plan.epoch

    def _serve_epoch(self, plan: Plan, place: Place) -> None:
        self.node.mailbox.forget()
        self.node.plan = plan
        peers = self.node.make_peers(plan)
        stage: BuiltStage | None = None
        try:
            self._register("ready", plan.epoch)
            self._connect(plan, peers)
            stage = self.stage = build_stage(self._surroundings(plan, peers), plan, place, self.kept)
            self._register("serving", plan.epoch)
            stage.engine.run()
        except _Superseded:
            pass
        finally:
            if self._is_superseded(plan):
                peers.abort()
            if stage is not None:
                stage.close()
            peers.close(CLOSE_TIMEOUT_S)
        if not self._is_superseded(plan):
            self._stop_asked.set()

    def _surroundings(self, plan: Plan, peers: Peers) -> Surroundings:
        return Surroundings(
            name=self.name,
            cluster=CLUSTER,
            mailbox=self.node.mailbox,
            peers=peers,
            clock=SystemClock(),
            reach=partial(self._reach, peers),
            acknowledge=self._board.acknowledge,
            is_asked_to_stop=self._stop_asked.is_set,
            is_superseded=partial(self._is_superseded, plan),
            kv_folder=self._kv_folder,
        )

    def _connect(self, plan: Plan, peers: Peers) -> None:
        for name in (*plan.peers_of(self.name), CONTROLLER):
            while name not in peers.names:
                address = self._wait_for(partial(self._ready_address, plan, name))
                if address is None:
                    raise Fatal("asked to stop before serving")
                try:
                    peers.connect(name, address, timeout_s=_CONNECT_TIMEOUT_S)
                except TransportError:
                    # It has just died, or is not that far yet; a newer plan will say so.
                    continue

    def _ready_address(self, plan: Plan, name: str) -> str | None:
        if self._is_superseded(plan):
            raise _Superseded
        if name == CONTROLLER:
            return self._controller_address
        member = self._board.members.get(name)
        return member.address if member is not None and member.epoch == plan.epoch else None

    def _reach(self, peers: Peers, name: str) -> None:
        if name in peers.names or name == self.name:
            return
        member = self._board.members.get(name)
        if member is None:
            raise TransportError("it is not registered", peer=name, phase="connect")
        peers.connect(name, member.address, timeout_s=_CONNECT_TIMEOUT_S)

    def _next_plan(self) -> Plan | None:
        plan = self._board.plan
        if plan is None or self.is_blind or (self._served is not None and plan.epoch <= self._served):
            return None
        if any(one.incarnation == self.node.incarnation for one in plan.fenced):
            raise Fatal(f"this incarnation was declared dead before epoch {plan.epoch}")
        return plan if plan.place_of(self.name) is not None or self.name in plan.standby else None

    def _wait_for(self, look: Callable[[], T | None]) -> T | None:
        """What ``look`` gives as soon as it is not None, or None when the worker is to stop."""
        with self._board.changed:
            while not self._stop_asked.is_set():
                if self.node.gate.is_dead:
                    raise Killed
                found = look()
                if found is not None:
                    return found
                self._board.changed.wait(_LOOK_S)
        return None

    def _is_superseded(self, plan: Plan) -> bool:
        newest = self._board.plan
        return not self.is_blind and newest is not None and newest.epoch > plan.epoch

    def _register(self, state: str, epoch: Epoch | None = None) -> None:
        entry = Registered(incarnation=self.node.incarnation, address=self.node.address, state=state, epoch=epoch)
        is_first = state == "starting"
        self._board.register(
            self.node.name, entry, over=lambda before: is_first or before.incarnation == self.node.incarnation
        )
