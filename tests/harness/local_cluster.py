"""A whole cluster in one process: engines as threads over local memory, the real controller, no store, no processes.

Its workers can die, be replaced and go on; an operator on a thread of its own does what a real one would decide.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from dejavu.clock import SystemClock
from dejavu.control.changing import changed_plan
from dejavu.control.holdings import HeldRow
from dejavu.control.journal import RestoreReceipt
from dejavu.control.memory import Limits
from dejavu.control.placement import Declared, place
from dejavu.control.plan import Plan
from dejavu.engine import messages as m
from dejavu.engine.payloads import decode_held, decode_spans
from dejavu.ids import Epoch, RowId, WorkerName
from dejavu.kv.levels import StreamingLevel
from dejavu.kv.pool import TORCH_DTYPES
from dejavu.models.spec import ModelSpec
from dejavu.models.tokenizer import TextCodec
from dejavu.report.counters import WorkerCounters
from dejavu.request import Completion, Request
from dejavu.serving.cluster_links import ClusterLinks
from dejavu.serving.controller import Controller

from harness.local_operator import Operator, Policy, new_process_or_standby
from harness.local_wire import CLOSE_TIMEOUT_S, CLUSTER, DEADLINE_S, Killed, Node, Tap
from harness.local_worker import Worker

__all__ = ["CLUSTER", "Killed", "LocalCluster", "Tap", "local_cluster"]

EPOCH = Epoch(1)


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
    def controller(self) -> Controller:
        """The real one."""
        return self._controller

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

    def change(self, **wanted: object) -> None:
        """The declared strategy changes: ``in_flight=4``, ``microbatch_token=8``. Any thread."""
        keys = {f"strategy.{key.replace('microbatch_', 'microbatch.')}": value for key, value in wanted.items()}

        def answered(plan: Plan) -> Plan:
            return changed_plan(plan, keys, revision=plan.revision + 1, may_grow=True, limits=Limits())

        self._operator.change(answered)

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
            decode_spans(answer.inbound.payload)
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
            held[name] = decode_held(answer.inbound.payload)
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
