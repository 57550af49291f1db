"""A whole cluster in one process: engines as threads over local memory, the real controller, no store, no processes.

Its workers can die, be replaced and go on; an operator on a thread of its own does what a real one would decide.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch

from dejavu.clock import SystemClock
from dejavu.control.holdings import HeldRow
from dejavu.control.journal import RestoreReceipt
from dejavu.control.placement import Declared, place
from dejavu.control.plan import Plan
from dejavu.control.replan import Dead, replaced
from dejavu.engine import messages as m
from dejavu.engine.mailbox import ClusterFenced, ClusterFormed
from dejavu.engine.peers import CONTROLLER
from dejavu.ids import Epoch, RowId, WorkerName
from dejavu.kv.levels import StreamingLevel
from dejavu.kv.pool import TORCH_DTYPES
from dejavu.models.spec import ModelSpec
from dejavu.models.tokenizer import TextCodec
from dejavu.report.counters import WorkerCounters
from dejavu.request import Completion, Request
from dejavu.serving.cluster_links import ClusterLinks
from dejavu.serving.controller import Controller

from harness.local_worker import CLOSE_TIMEOUT_S, CLUSTER, DEADLINE_S, Board, Killed, Node, Tap, Wire, Worker

__all__ = ["CLUSTER", "Killed", "LocalCluster", "Tap", "local_cluster", "new_process_or_standby"]

EPOCH = Epoch(1)
Policy: TypeAlias = Callable[[Plan, Dead], Plan]
"""The plan that follows a death."""


def new_process_or_standby(plan: Plan, dead: Dead) -> Plan:
    """Each dead worker's place goes to a standby that lives, or to a new process of its name."""
    standbys = iter([name for name in plan.standby if name not in dead])
    placed = [name for name in plan.workers if name in dead]
    return replaced(plan, dead, {name: next(standbys, name) for name in placed})


class Answers:
    """The observer: final lines by request."""

    def __init__(self) -> None:
        self.completions: dict[str, Completion] = {}

    def token(self, request_id: str, at_s: float) -> None:
        pass

    def ended(self, completion: Completion, token_times_s: Sequence[float]) -> None:
        assert completion.id not in self.completions, f"{completion.id} ended twice"
        assert len(token_times_s) == len(completion.tokens)
        self.completions[completion.id] = completion


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

    def stop(self) -> None:
        """No worker is replaced any more, and every thread has ended."""
        with self.board.changed:
            self._is_stopped = True
            self.board.changed.notify_all()
        if self.thread.ident is not None:
            self.thread.join(CLOSE_TIMEOUT_S)
        for worker in (*self.workers.values(), *self.ghosts):
            worker.thread.join(0.0 if worker.is_blind else CLOSE_TIMEOUT_S)
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
            while self._wait(lambda: bool(self._unrepaired)):
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
            incarnations = {name: worker.node.incarnation for name, worker in dead.items()}
            self.plan = self.policy(self.plan, incarnations)
            self.ghosts += dead.values()
            self.controller.plan = self.plan
            with self.board.changed:
                self.board.plan = self.plan
                for name in dead:
                    del self.workers[name], self.board.members[name]
            self.controller.mailbox.post(ClusterFenced(plan=self.plan))
            for name in dead:
                if name in (*self.plan.workers, *self.plan.standby):
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


class LocalCluster:
    """A cluster that is up; the controller's ``Overseer`` and ``Watcher``."""

    def __init__(self, operator: Operator, codec: TextCodec | None) -> None:
        self.receipts: list[RestoreReceipt] = []
        self.suspected: list[tuple[str, Epoch]] = []
        self._operator = operator
        self._answers = Answers()
        self._clock = SystemClock()
        self._deadline_s = self._clock.monotonic() + DEADLINE_S
        self._at: dict[object, list[Callable[[], None]]] = {}
        self.links = self.link(operator.plan, operator.start())
        # One for the cluster's whole life: row ids are never used twice.
        self._controller = Controller(self.links, codec, self._answers, self, self)

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._operator.plan

    @property
    def workers(self) -> Sequence[Worker]:
        """Those that have a place, in the plan's order."""
        return [self._operator.workers[name] for name in self.plan.workers]

    @property
    def controller_node(self) -> Node:
        """The controller's end."""
        return self._operator.controller

    @property
    def operator(self) -> Operator:
        """Who repairs."""
        return self._operator

    def serve(self, requests: Sequence[Request]) -> dict[str, Completion]:
        """Every request's line. Raises what the controller raises, or says which engine ended."""
        before = set(self._answers.completions)
        self._controller.serve(requests)
        new = {id_: line for id_, line in self._answers.completions.items() if id_ not in before}
        assert set(new) == {request.id for request in requests}
        return new

    def fail(self, *names: str) -> None:
        """The workers' transports are aborted and their threads end; the operator replaces them. Any thread."""
        self._operator.fail(names)

    def at_step(self, microbatch: int, step: int, act: Callable[[], None]) -> None:
        """``act`` is called, once, on the controller's thread, when the step's tokens have come."""
        self._at.setdefault((microbatch, step), []).append(act)

    def at_phase(self, name: str, act: Callable[[], None]) -> None:
        """``act`` is called, once, on the controller's thread, when the phase begins (see ``Watcher.phase``)."""
        self._at.setdefault(name, []).append(act)

    def counters(self) -> dict[str, WorkerCounters]:
        """What every worker has counted."""
        answers = self.links.ask(m.AskReport(epoch=self.plan.epoch), self.plan.workers, m.Report, timeout_s=DEADLINE_S)
        counters = {}
        for name, answer in answers.items():
            assert isinstance(answer.message, m.Report)
            counters[name] = answer.message.counters
            m.decode_spans(answer.inbound.payload)
            answer.inbound.release()
        return counters

    def held(self) -> dict[str, list[HeldRow]]:
        """What each worker that keeps rows holds of them, in pools and copies."""
        stages = (*self.plan.token_pipeline.stages, *self.plan.memory_stages)
        workers = [stage.worker for stage in stages]
        message = m.AskHoldings(epoch=self.plan.epoch)
        answers = self.links.ask(message, workers, m.Holdings, timeout_s=DEADLINE_S)
        held = {}
        for name, answer in answers.items():
            held[name] = m.decode_held(answer.inbound.payload)
            answer.inbound.release()
        return held

    def cells(self, microbatch: int, row_index: int, length: int) -> torch.Tensor:
        """The cells of one place over all layers: [layer, (K, V), head, position, dim]."""
        pipeline, layout = self.plan.token_pipeline, self.plan.model.layout
        message = m.InspectRow(epoch=self.plan.epoch, microbatch=microbatch, row_index=row_index, length=length)
        workers = [stage.worker for stage in pipeline.stages]
        answers = self.links.ask(message, workers, m.InspectedRow, timeout_s=DEADLINE_S)
        parts = []
        for stage in pipeline.stages:
            payload = bytearray(answers[stage.worker].inbound.payload)
            answers[stage.worker].inbound.release()
            flat = torch.frombuffer(payload, dtype=TORCH_DTYPES[layout.dtype])
            parts.append(flat.reshape(len(stage.layers), 2, layout.num_kv_heads, length, layout.head_dim))
        return torch.cat(parts)

    def copy(self, row_id: RowId, length: int) -> torch.Tensor:
        """A row's copy at the memory stage, once it has so many positions: [layer, (K, V), head, position, dim]."""
        layout = self.plan.model.layout
        (stage,) = self.plan.memory_stages
        message = m.InspectCopy(epoch=self.plan.epoch, row_id=row_id, length=length)
        while True:
            answer = self.links.ask(message, [stage.worker], m.InspectedCopy, timeout_s=DEADLINE_S)[stage.worker]
            payload = bytearray(answer.inbound.payload)
            answer.inbound.release()
            assert isinstance(answer.message, m.InspectedCopy)
            if payload:
                assert answer.message.length >= length
                flat = torch.frombuffer(payload, dtype=TORCH_DTYPES[layout.dtype])
                return flat.reshape(len(stage.layers), 2, layout.num_kv_heads, length, layout.head_dim)
            assert self._clock.monotonic() < self._deadline_s, f"row {row_id} has {answer.message.length} positions"

    def set_streaming(self, level: StreamingLevel) -> None:
        """KV leaves in another way; no request may be open."""
        self.links.every_worker(m.SetStreaming(epoch=self.plan.epoch, level=level))

    # What the controller calls: its overseer and its watcher.

    def why_failed(self) -> str | None:
        reason = self._operator.why_failed()
        if reason is None and self._clock.monotonic() >= self._deadline_s:
            return f"no end in {DEADLINE_S:g} s"
        return reason

    def suspect(self, worker: str, epoch: Epoch, reason: str) -> None:
        self.suspected.append((worker, epoch))

    def link(self, plan: Plan, addresses: Mapping[WorkerName, str]) -> ClusterLinks:
        node = self._operator.controller
        peers = node.make_peers(plan)
        for name in plan.workers:
            peers.connect(name, addresses[name], timeout_s=CLOSE_TIMEOUT_S)
        self.links = ClusterLinks(plan, peers, node.mailbox, SystemClock())
        return self.links

    def resumed(self, epoch: Epoch, receipt: RestoreReceipt) -> None:
        self.receipts.append(receipt)

    def began(self) -> None:
        self._act("began")

    def stepped(self, microbatch: int, step: int) -> None:
        self._act((microbatch, step))

    def phase(self, name: str) -> None:
        self._act(name)

    def _act(self, moment: object) -> None:
        for act in self._at.pop(moment, ()):
            act()


@contextmanager
def local_cluster(
    declared: Declared,
    model: ModelSpec,
    *,
    codec: TextCodec | None = None,
    tap: Tap | None = None,
    kv_folder: Path | None = None,
    policy: Policy = new_process_or_standby,
) -> Iterator[LocalCluster]:
    """A cluster of the declared shape serves; at the end every engine has stopped by itself and no thread is left."""
    plan = place(declared, model, epoch=EPOCH)
    before = set(threading.enumerate())
    operator = Operator(plan, policy, tap, kv_folder)
    try:
        cluster = LocalCluster(operator, codec)
        try:
            yield cluster
        finally:
            cluster.links.stop_workers()
    finally:
        operator.stop()
        operator.controller.close()
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]
    assert not left, f"threads left behind: {left}"
