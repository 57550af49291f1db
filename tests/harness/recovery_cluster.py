"""A cluster on paper in which anything dies at any moment: links and an operator around real decisions.

Links keep their order, different links do not; what was sent in an epoch may arrive in any later one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dejavu.control.holdings import RowRestore
from dejavu.control.plan import Plan
from dejavu.control.replan import replaced, shrunk
from dejavu.errors import InfeasibleError
from dejavu.ids import Epoch, IncarnationId, WorkerName

from harness.recovery_controller import Asked, RecoveryController
from harness.recovery_messages import Cells
from harness.recovery_model import right_cells
from harness.recovery_worker import CONTROLLER, Worker


@dataclass(slots=True)
class Link:
    """Messages under way from one process to another, of one epoch."""

    receiver: Worker | None
    epoch: Epoch
    mails: deque[Any] = field(default_factory=deque)
    is_broken: bool = False


class RecoveryCluster:
    """The store's plan, every process that ever was, what is under way between them, and the controller.

    Args:
        plan: the first.
        ways: how the operator may repair: by a new ``process``, by a ``standby``, or by a plan that is ``shrink``ed;
            where a way is not open, by a new process.
    """

    def __init__(self, plan: Plan, ways: Sequence[str]) -> None:
        self.plan = plan
        self.ways = ways
        self.processes: list[Worker] = []
        self.current: dict[WorkerName, Worker] = {}
        self.accused: set[WorkerName] = set()
        self.book: dict[tuple[Epoch, WorkerName], Worker] = {}
        self.links: dict[tuple[str, str, Epoch], Link] = {}
        self.is_link_broken = False
        self.controller = RecoveryController(partial(self.send, None), self._check_held)
        self.restores: list[RowRestore] = []
        self.num_stale = 0
        self._incarnations = itertools.count(1)
        for name in (*plan.workers, *plan.standby):
            self._start(name)

    # The operator.

    @property
    def dead(self) -> dict[WorkerName, IncarnationId]:
        """Whom the operator would declare dead now."""
        listed = (*self.plan.workers, *self.plan.standby)
        return {
            name: self.current[name].incarnation
            for name in listed
            if not self.current[name].is_up or name in self.accused
        }

    @property
    def needs_repair(self) -> bool:
        return self.is_link_broken or bool(self.dead)

    def repair(self, way: str) -> None:
        """A new plan is in the store, and new processes start where it wants them."""
        dead = self.dead
        standbys = [name for name in self.plan.standby if name not in dead and way == "standby"]
        placed = [name for name in dead if name in self.plan.workers]
        by = {name: name for name in dead} | dict(zip(placed, standbys, strict=False))
        try:
            plan = shrunk(self.plan, dead) if way == "shrink" else replaced(self.plan, dead, by)
        except InfeasibleError:
            plan = replaced(self.plan, dead, by)
        self.plan = plan
        self.accused.clear()
        self.is_link_broken = False
        for name in dead:
            del self.current[name]
            if name in plan.workers or name in plan.standby:
                self._start(name)

    def break_link(self, choice: int) -> None:
        """One link loses what is under way and takes nothing more; its epoch will not last."""
        whole = [link for link in self.links.values() if not link.is_broken]
        if whole:
            link = whole[choice % len(whole)]
            link.is_broken = self.is_link_broken = True
            link.mails.clear()

    def _start(self, name: WorkerName) -> None:
        incarnation = IncarnationId(f"{name}-{next(self._incarnations)}")
        self.current[name] = Worker(name, incarnation, self.send)
        self.processes.append(self.current[name])

    # What can happen next, by itself.

    def actions(self, slow: int | None = None, *, copies_lag: bool = False) -> list[Callable[[], None]]:
        """Everything that may happen now, in a fixed order.

        Args:
            slow: nothing reaches this process yet.
            copies_lag: links whose next message is a copy deliver nothing yet.
        """
        deaf = None if slow is None else self.processes[slow % len(self.processes)]
        actions: list[Callable[[], None]] = [
            partial(self._deliver, link)
            for link in self.links.values()
            if link.mails
            and (link.receiver is None or (link.receiver.is_up and link.receiver is not deaf))
            and not (copies_lag and isinstance(link.mails[0], Cells) and link.mails[0].is_copy)
        ]
        for worker in self.processes:
            actions += [worker.begin_step] * worker.can_step
            if worker.is_up and worker.epoch != self.plan.epoch:
                actions.append(partial(self._join, worker))
        controller = self.controller
        if controller.plan != self.plan:
            actions.append(partial(controller.fence, self.plan))
        elif controller.epoch is None and all((self.plan.epoch, name) in self.book for name in self.plan.workers):
            actions.append(controller.form)
        actions += [controller.start_prompt] * controller.can_start_prompt
        return actions + [partial(self.repair, way) for way in self.ways if self.needs_repair]

    def send(self, sender: Worker | None, to: str, body: Any) -> None:
        """The message is under way, in the sender's epoch."""
        epoch = self.controller.epoch if sender is None else sender.epoch
        receiver = None if to == CONTROLLER else self.book[epoch, WorkerName(to)]
        names = (CONTROLLER if one is None else one.incarnation for one in (sender, receiver))
        link = self.links.setdefault((*names, epoch), Link(receiver, epoch))
        if not link.is_broken:
            link.mails.append(body)

    def _deliver(self, link: Link) -> None:
        body = link.mails.popleft()
        if link.receiver is not None:
            link.receiver.receive(link.epoch, body)
        elif link.epoch != self.controller.epoch:
            self.num_stale += 1
        else:
            self.controller.receive(body)

    def _join(self, worker: Worker) -> None:
        if worker.join(self.plan):
            assert (self.plan.epoch, worker.name) not in self.book, f"{worker.name} has two owners in one epoch"
            self.book[self.plan.epoch, worker.name] = worker

    def _check_held(self, restore: RowRestore, one: Asked) -> None:
        """A row resumes never beyond what processes of this epoch hold, cell by cell the right ones."""
        self.restores.append(restore)
        right = right_cells(self.plan.model.num_layers, (one.prompt + one.tokens)[: restore.length])
        workers = [self.book[self.controller.epoch, name] for name in self.controller.plan.workers]
        stores = [cells for worker in workers for cells in worker.stores_of(restore.row_id)]
        for layer, positions in right.items():
            assert any(positions.items() <= cells[layer].items() for cells in stores), (restore, layer)
