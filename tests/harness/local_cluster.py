"""A whole cluster in one process: engines as threads over local memory, the real controller, no store, no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

import torch

from dejavu.clock import SystemClock
from dejavu.control.placement import Declared, place
from dejavu.control.plan import Plan
from dejavu.engine import messages as m
from dejavu.engine.build import BuiltStage, build_stage, load_stage
from dejavu.engine.mailbox import Mailbox, PeerLost, Wake
from dejavu.engine.peers import CONTROLLER, Peers
from dejavu.ids import Epoch, RowId, WorkerName
from dejavu.kv.levels import StreamingLevel
from dejavu.kv.pool import TORCH_DTYPES
from dejavu.models.spec import ModelSpec
from dejavu.models.tokenizer import TextCodec
from dejavu.report.counters import WorkerCounters
from dejavu.report.spans import SpanRecorder
from dejavu.request import Completion, Request
from dejavu.serving.cluster_links import ClusterLinks
from dejavu.serving.controller import Controller
from dejavu.transport.base import Buffer, Hello, Link
from dejavu.transport.local import LocalNetwork, LocalTransport

CLUSTER = "in-process"
SECRET = "only for tests"
EPOCH = Epoch(1)
CLOSE_TIMEOUT_S = 5.0
DEADLINE_S = 60.0
"""Far beyond any run of these tests: a hang becomes an error that says so."""

Tap: TypeAlias = Callable[[str, str, bytes, bytes], Iterable[tuple[bytes, bytes]]]
"""Gets (sender, peer, header, payload) of a message about to leave; gives the messages that leave in its place."""


class TappedLink:
    """A link whose messages go through a tap."""

    def __init__(self, link: Link, sender: str, tap: Tap, lock: threading.Lock) -> None:
        self._link = link
        self._sender = sender
        self._tap = tap
        self._lock = lock
        self.peer, self.address, self.description = link.peer, link.address, link.description

    @property
    def alive(self) -> bool:
        return self._link.alive

    def send(self, header: bytes, payload: Sequence[Buffer] = (), *, timeout_s: float = 60.0) -> Future[None]:
        with self._lock:
            messages = list(self._tap(self._sender, self.peer, header, b"".join(payload)))
            for new_header, new_payload in messages:
                self._link.send(new_header, (memoryview(new_payload),) if new_payload else (), timeout_s=timeout_s)
        # The tap took a copy, so the caller has its buffers back at once.
        sent: Future[None] = Future()
        sent.set_result(None)
        return sent

    def close(self, timeout_s: float = 10.0) -> None:
        self._link.close(timeout_s)

    def abort(self) -> None:
        self._link.abort()


class TappedTransport(LocalTransport):
    """A local transport whose outgoing links are tapped."""

    def __init__(self, network: LocalNetwork, sender: str, tap: Tap, lock: threading.Lock) -> None:
        super().__init__(network, SECRET)
        self._sender, self._tap, self._tap_lock = sender, tap, lock

    def connect(self, address: str, hello: Hello, *, peer: str, timeout_s: float = 10.0) -> TappedLink:  # type: ignore[override]
        link = super().connect(address, hello, peer=peer, timeout_s=timeout_s)
        return TappedLink(link, self._sender, self._tap, self._tap_lock)


class Node:
    """A name on the network with a mailbox and links: a worker's or the controller's end."""

    def __init__(self, name: str, plan: Plan, transport: LocalTransport, *, holds_kv: bool) -> None:
        fingerprint = plan.model.layout.fingerprint if holds_kv else ""
        self.name = name
        self.transport = transport
        self.mailbox = Mailbox(cluster=CLUSTER, epoch=lambda: plan.epoch, fingerprint=lambda: fingerprint)
        self.address = transport.listen(self.mailbox)
        hello = Hello(cluster=CLUSTER, name=name, incarnation=name, epoch=plan.epoch, fingerprint=fingerprint)
        self.peers = Peers(transport, hello, timeout_s=DEADLINE_S, on_failed=self._failed)

    def link_to(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.peers.connect(node.name, node.address, timeout_s=DEADLINE_S)

    def close(self) -> None:
        self.peers.close(CLOSE_TIMEOUT_S)
        self.transport.close(CLOSE_TIMEOUT_S)

    def _failed(self, peer: str, reason: str) -> None:
        self.mailbox.post(PeerLost(peer=peer, reason=reason))


class Worker:
    """One stage, its engine on a thread of its own."""

    def __init__(self, node: Node, plan: Plan, kv_folder: Path | None) -> None:
        self.node = node
        self._kv_folder = None if kv_folder is None else kv_folder / node.name
        self._plan = plan
        self._stop_asked = threading.Event()
        self.problem: BaseException | None = None
        self.stage: BuiltStage | None = None
        self.thread = threading.Thread(target=self._run, name=f"engine-{node.name}", daemon=True)

    def build(self) -> None:
        clock, name = SystemClock(), WorkerName(self.node.name)
        place_ = self._plan.place_of(name)
        assert place_ is not None
        recorder = SpanRecorder(clock)
        self.stage = build_stage(
            name=name,
            cluster=CLUSTER,
            plan=self._plan,
            place=place_,
            loaded=load_stage(self._plan, place_, recorder),
            mailbox=self.node.mailbox,
            peers=self.node.peers,
            recorder=recorder,
            clock=clock,
            is_asked_to_stop=self._stop_asked.is_set,
            kv_folder=self._kv_folder,
        )

    def ask_to_stop(self) -> None:
        self._stop_asked.set()
        self.node.mailbox.post(Wake())

    def _run(self) -> None:
        assert self.stage is not None
        torch.set_num_threads(1)
        try:
            self.stage.engine.run()
        except BaseException as error:  # Whatever ends an engine must reach the test.
            self.problem = error


class Answers:
    """The observer: final lines by request."""

    def __init__(self) -> None:
        self.completions: dict[str, Completion] = {}

    def token(self, request_id: str, at_s: float) -> None:
        pass

    def ended(self, completion: Completion, token_times_s: Sequence[float]) -> None:
        assert completion.id not in self.completions, f"{completion.id} ended twice"
        self.completions[completion.id] = completion


class LocalCluster:
    """A cluster that is up."""

    def __init__(self, plan: Plan, links: ClusterLinks, workers: Sequence[Worker], codec: TextCodec | None) -> None:
        self.plan = plan
        self.links = links
        self.workers = workers
        self._answers = Answers()
        self._clock = SystemClock()
        self._deadline_s = self._clock.monotonic() + DEADLINE_S
        # One for the cluster's whole life: row ids are never used twice.
        self._controller = Controller(links, codec, self._answers, self._failure)

    def serve(self, requests: Sequence[Request]) -> dict[str, Completion]:
        """Every request's line. Raises what the controller raises, or says which engine ended."""
        before = set(self._answers.completions)
        self._controller.serve(requests)
        new = {id_: line for id_, line in self._answers.completions.items() if id_ not in before}
        assert set(new) == {request.id for request in requests}
        return new

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

    def _failure(self) -> str | None:
        for worker in self.workers:
            if worker.problem is not None:
                return f"engine {worker.node.name}: {worker.problem!r}"
        return None if self._clock.monotonic() < self._deadline_s else f"no end in {DEADLINE_S:g} s"


@contextmanager
def local_cluster(
    declared: Declared,
    model: ModelSpec,
    *,
    codec: TextCodec | None = None,
    tap: Tap | None = None,
    kv_folder: Path | None = None,
) -> Iterator[LocalCluster]:
    """A cluster of the declared shape serves; at the end every engine has stopped by itself and no thread is left."""
    plan = place(declared, model, epoch=EPOCH)
    network, lock = LocalNetwork(), threading.Lock()

    def transport(name: str) -> LocalTransport:
        return LocalTransport(network, SECRET) if tap is None else TappedTransport(network, name, tap, lock)

    before = set(threading.enumerate())
    with ExitStack() as stack:
        controller = Node(CONTROLLER, plan, transport(CONTROLLER), holds_kv=False)
        stack.callback(controller.transport.close, CLOSE_TIMEOUT_S)
        workers = [Worker(Node(name, plan, transport(name), holds_kv=True), plan, kv_folder) for name in plan.workers]
        nodes = {worker.node.name: worker.node for worker in workers}
        for worker in workers:
            stack.callback(worker.node.close)
            worker.node.link_to([*(nodes[peer] for peer in plan.peers_of(WorkerName(worker.node.name))), controller])
            worker.build()
        controller.link_to(nodes.values())
        links = ClusterLinks(plan, controller.peers, controller.mailbox, SystemClock())
        for worker in workers:
            worker.thread.start()
        stack.callback(_stop, links, workers)
        yield LocalCluster(plan, links, workers, codec)
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]
    assert not left, f"threads left behind: {left}"


def _stop(links: ClusterLinks, workers: Sequence[Worker]) -> None:
    links.stop_workers()
    for worker in workers:
        worker.thread.join(CLOSE_TIMEOUT_S)
        if worker.thread.is_alive():
            worker.ask_to_stop()
        assert worker.stage is not None
        worker.stage.close()
    links.close(CLOSE_TIMEOUT_S)
