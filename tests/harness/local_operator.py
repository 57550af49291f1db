"""The operator of a cluster in one process: starts its workers, and replaces those that die."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from dejavu.control.plan import Plan
from dejavu.control.replan import Dead, replaced
from dejavu.engine.mailbox import ClusterFenced, ClusterFormed
from dejavu.engine.peers import CONTROLLER
from dejavu.ids import WorkerName

from harness.local_wire import CLOSE_TIMEOUT_S, DEADLINE_S, Node, Tap, Wire
from harness.local_worker import Board, Worker

Policy: TypeAlias = Callable[[Plan, Dead], Plan]
"""The plan that follows a death."""


def new_process_or_standby(plan: Plan, dead: Dead) -> Plan:
    """Each dead worker's place goes to a standby that lives, or to a new process of its name."""
    standbys = iter([name for name in plan.standby if name not in dead])
    placed = [name for name in plan.workers if name in dead]
    return replaced(plan, dead, {name: next(standbys, name) for name in placed})


class Operator:
    """The workers of the plan, and what becomes of it when some of them die. Any thread."""

    def __init__(self, plan: Plan, policy: Policy, tap: Tap | None, kv_folder: Path | None) -> None:
        self.plan = plan
        self.policy = policy
        self.board = Board()
        self.problem: BaseException | None = None
        self.wire = Wire(tap, self.fail)
        self.controller = Node(CONTROLLER, CONTROLLER, self.wire, holds_kv=False)
        self.controller.plan = plan
        self.workers: dict[str, Worker] = {}
        """The newest incarnation of each."""
        self.ghosts: list[Worker] = []
        """Those that were replaced."""
        self._kv_folder = kv_folder
        self._dead: dict[WorkerName, Worker] = {}
        self._unrepaired: set[WorkerName] = set()
        self._wanted: list[Callable[[Plan], Plan]] = []
        self._is_stopped = False
        self.thread = threading.Thread(target=self._run, name="operator", daemon=True)

    def start(self) -> Mapping[WorkerName, str]:
        """The first plan's workers serve; the addresses."""
        for name in (*self.plan.workers, *self.plan.standby):
            self._start(name)
        self.board.plan = self.plan
        self._look_up()
        addresses = self._wait_serving(self.plan)
        assert addresses is not None, f"the cluster did not form: {self.why_failed()}"
        self._wait(lambda: all(self.board.members[name].state == "ready" for name in self.plan.standby))
        self.thread.start()
        return addresses

    def fail(self, names: Sequence[str]) -> None:
        """These workers die at once, and will be replaced."""
        with self.board.changed:
            for name in names:
                worker = self.workers[WorkerName(name)]
                worker.die()
                self._unrepaired.add(worker.name)
            self.board.changed.notify_all()

    def declare_dead(self, name: str) -> None:
        """The worker is replaced; it lives, does not hear of it, and nothing that it sends arrives yet."""
        worker = self.workers[WorkerName(name)]
        worker.is_blind = worker.node.gate.is_shut = True
        with self.board.changed:
            self._unrepaired.add(worker.name)
            self.board.changed.notify_all()

    def change(self, wanted: Callable[[Plan], Plan]) -> None:
        """The plan becomes another one, with nobody dead. Any thread."""
        with self.board.changed:
            self._wanted.append(wanted)
            self.board.changed.notify_all()

    def stop(self) -> None:
        """No worker is replaced any more, and every thread has ended."""
        with self.board.changed:
            self._is_stopped = True
            self.board.changed.notify_all()
        if self.thread.ident is not None:
            self.thread.join(CLOSE_TIMEOUT_S)
        for worker in (*self.workers.values(), *self.ghosts):
            # Standbys have no link over which the controller could have told them.
            worker.thread.join(CLOSE_TIMEOUT_S if worker.name in self.plan.workers and not worker.is_blind else 0.0)
            if worker.thread.is_alive():
                worker.ask_to_stop()
                worker.thread.join(CLOSE_TIMEOUT_S)
            worker.node.close()

    def why_failed(self) -> str | None:
        """The first engine that ended by itself, or the operator's own trouble."""
        for name, worker in self.workers.items():
            if worker.problem is not None and not worker.node.gate.is_dead:
                return f"engine {name}: {worker.problem!r}"
        return None if self.problem is None else f"operator: {self.problem!r}"

    def _run(self) -> None:
        try:
            while self._wait(lambda: bool(self._unrepaired or self._wanted)):
                self._repair()
        except BaseException as error:  # A thread that ends unseen would look like a hang.
            self.problem = error

    def _repair(self) -> None:
        """One plan after the other until all of one's workers serve."""
        addresses: Mapping[WorkerName, str] | None = None
        while addresses is None and not self._is_stopped:
            with self.board.changed:
                dead = {name: self.workers[name] for name in sorted(self._unrepaired)}
                self._unrepaired.clear()
                wanted, self._wanted = self._wanted, []
            incarnations = {name: worker.node.incarnation for name, worker in dead.items()}
            for change in wanted:
                self.plan = change(self.plan)
            if dead:
                self.plan = self.policy(self.plan, incarnations)
            self.ghosts += dead.values()
            self.controller.plan = self.plan
            with self.board.changed:
                self.board.plan = self.plan
                for name in dead:
                    del self.workers[name], self.board.members[name]
            self.controller.mailbox.post(ClusterFenced(plan=self.plan))
            for name in (*self.plan.workers, *self.plan.standby):
                if name not in self.workers:
                    self._start(name)
            self._look_up()
            addresses = self._wait_serving(self.plan)
        if addresses is not None:
            self.controller.mailbox.post(ClusterFormed(plan=self.plan, addresses=addresses))

    def _start(self, name: WorkerName) -> None:
        number = 1 + sum(worker.name == name for worker in self.ghosts)
        node = Node(name, f"{name}-{number}", self.wire, holds_kv=True)
        self.workers[name] = Worker(node, self.board, self.controller.address, self._kv_folder)
        self.workers[name].thread.start()

    def _look_up(self) -> None:
        for worker in self.workers.values():
            worker.look_up()

    def _wait_serving(self, plan: Plan) -> Mapping[WorkerName, str] | None:
        """The workers' addresses; None when another one died meanwhile, or everything ends."""

        def serve() -> bool:
            members = [self.board.members.get(name) for name in plan.workers]
            return all(one is not None and (one.state, one.epoch) == ("serving", plan.epoch) for one in members)

        if not self._wait(lambda: bool(self._unrepaired) or self.why_failed() is not None or serve()) or not serve():
            return None
        return {name: self.board.members[name].address for name in plan.workers}

    def _wait(self, is_so: Callable[[], bool]) -> bool:
        """True once it is so; False when everything ends before."""
        with self.board.changed:
            self.board.changed.wait_for(lambda: self._is_stopped or is_so(), DEADLINE_S)
            return not self._is_stopped and is_so()
