"""A made-up world for the recovery operator: members, processes and a store that do what it decides."""

from __future__ import annotations

import itertools

import msgspec

from dejavu.control.journal import Cause, RepairJournal, RestoreReceipt
from dejavu.control.member import Member, MemberState, encode_json
from dejavu.control.plan import Plan
from dejavu.ids import IncarnationId, WorkerName
from operators import changes, placement, recovery
from operators.actions import Action, KillWorker, PutPlan, PutSpec, StartWorker
from operators.observation import Moment, Observed, ProcessExit
from operators.repair_state import RepairState, Rules

WALL_S = 1000.0
RECEIPT = RestoreReceipt(restored_s=1.0, resumed_s=2.0)


class World:
    """Members, processes and a store; ``look`` is one pass that also carries out what it decided."""

    def __init__(self, plan: Plan, *, may_grow: bool = True, serve: bool = True, spec: bytes = b"spec") -> None:
        self.rules = Rules(may_grow=may_grow, confirm_s=6.5, patience_s=20.0, start_timeout_s=30.0)
        self.state = RepairState(plan=plan, spec=spec)
        self.spec = spec
        self.now_s = 0.0
        self.members: dict[WorkerName, Member] = {}
        self.plan: bytes | None = None
        self.is_readable = True
        self.own_key_present = True
        self.takes_plans = True
        self.is_ending = False
        self.running: set[WorkerName] = set()
        self.frozen: set[WorkerName] = set()
        self.pids: dict[WorkerName, int] = {}
        self.exits: list[ProcessExit] = []
        self.done: list[Action] = []
        self._pid = itertools.count(100)
        if serve:
            self.look()
            for name in plan.standby:
                self.register(name, "ready", placed=False)
            self.serve()
            self.look()
            self.done.clear()

    def register(self, name: WorkerName, state: MemberState, *, placed: bool = True) -> None:
        """The worker's newest process has registered in the epoch of the store's plan."""
        plan = self.state.plan
        self.members[name] = Member(
            name=name,
            incarnation=IncarnationId(f"i{self.pids[name]}"),
            host="h",
            pid=self.pids[name],
            address=f"{name}:{self.pids[name]}",
            device="cpu",
            memory_bytes=1,
            state=state,
            pipeline="token" if placed else None,
            epoch=plan.epoch if placed else None,
        )

    def serve(self) -> None:
        """Whoever has a place and runs serves in the plan in force; whoever is on standby waits."""
        for name in self.state.plan.workers:
            if name in self.running - self.frozen:
                self.register(name, "serving")
        for name in self.state.plan.standby:
            if name in self.running - self.frozen:
                self.register(name, "ready", placed=False)

    def kill(self, name: WorkerName, *, forget: bool = True) -> None:
        """The process ends by kill -9, and its lease is given back unless ``forget`` is False."""
        self.running.discard(name)
        self.frozen.discard(name)
        self.exits.append(ProcessExit(name=name, status=-9, pid=self.pids[name], at_s=WALL_S + self.now_s))
        if forget:
            self.members.pop(name, None)

    def freeze(self, name: WorkerName) -> None:
        """The process does nothing any more, and its lease has run out."""
        self.frozen.add(name)
        self.members.pop(name, None)

    def look(self, after_s: float = 0.0) -> tuple[Action, ...]:
        """One pass; returns what recovery decided in it."""
        self.now_s += after_s
        observed = Observed(
            members=dict(self.members) if self.is_readable else None,
            plan=self.plan if self.is_readable else None,
            spec=self.spec,
            running=frozenset(self.running),
            exits=tuple(self.exits),
            pids=dict(self.pids),
            is_ending=self.is_ending,
            own_key_present=self.own_key_present,
        )
        now = Moment(monotonic_s=self.now_s, wall_s=WALL_S + self.now_s)
        self.state, actions = recovery.step(self.state, observed, now, self.rules)
        self.state, asked = changes.step(self.state, observed, now, self.rules)
        for action in (*placement.decide(self.state.spec, self.state.newest, observed), *actions, *asked):
            self._carry_out(action)
        self.done += actions
        return actions

    def looks(self, num: int = 4, *, after_s: float = 0.0) -> None:
        """So many passes."""
        for _ in range(num):
            self.look(after_s)

    def repaired(self, num_looks: int = 4) -> RepairJournal:
        """The fence is in, whoever was started serves, and the controller has resumed; returns the journal."""
        self.looks(num_looks)
        self.serve()
        self.look()
        self.resume()
        return self.state.journals[-1]

    def resume(self) -> None:
        """The controller's rows go on in the plan in force."""
        epoch = self.state.plan.epoch
        self.state = changes.resumed(recovery.resumed(self.state, epoch, RECEIPT), epoch, RECEIPT)

    def all_of(self, kind: type[Action]) -> list[Action]:
        """What was decided of that kind since the cluster served."""
        return [action for action in self.done if isinstance(action, kind)]

    def _carry_out(self, action: Action) -> None:
        match action:
            case PutPlan() if self.takes_plans:
                assert action.previous == self.plan
                self.plan = encode_json(action.plan)
            case PutSpec() if action.previous == self.spec:
                self.spec = self.state.spec
            case StartWorker():
                assert self.rules.starts_processes
                assert action.name not in self.running
                self.running.add(action.name)
                self.pids[action.name] = next(self._pid)
            case KillWorker():
                self.running.discard(action.name)
                self.frozen.discard(action.name)
            case _:
                pass


def with_standby(plan: Plan, *names: WorkerName) -> Plan:
    """The plan with these workers on standby."""
    return msgspec.structs.replace(plan, standby=names)


def causes(journal: RepairJournal) -> list[tuple[WorkerName, Cause]]:
    """Who failed in that repair and how that was noticed."""
    return [(failure.worker, failure.cause) for failure in journal.failures]
