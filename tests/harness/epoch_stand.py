"""A controller in one epoch after the other, against a cluster that says what the test wants."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import msgspec

from dejavu.clock import VirtualClock
from dejavu.control.holdings import HeldRow
from dejavu.control.journal import RestoreReceipt
from dejavu.control.plan import Plan
from dejavu.engine import messages as m
from dejavu.engine.mailbox import ClusterFenced, ClusterFormed, Event, Received
from dejavu.engine.payloads import encode_held
from dejavu.ids import Epoch, RequestId, RowId, WorkerName
from dejavu.kv.layout import LayerRange
from dejavu.request import Completion, Request
from dejavu.serving.cluster_links import ClusterLinks
from dejavu.serving.controller import Controller
from dejavu.transport.base import Hello, Inbound, TransportError

from harness.plans import colocated_plan

A = RowId(1)
MOST_S = 120.0
FIRST, SECOND = LayerRange(0, 3), LayerRange(3, 6)


def later(plan: Plan, epoch: int) -> Plan:
    return msgspec.structs.replace(plan, epoch=Epoch(epoch))


def received(message: m.AnyMessage, sender: str = "w0", payload: bytes = b"") -> Received:
    hello = Hello(cluster="c", name=sender, incarnation="i", epoch=1)
    inbound = Inbound(hello=hello, header=b"", payload=memoryview(payload), release=lambda: None)
    return Received(message=message, inbound=inbound)


def formed(plan: Plan) -> ClusterFormed:
    return ClusterFormed(plan=plan, addresses={worker: f"{worker}:1" for worker in plan.workers})


class EpochStand:
    """Peers, mailbox, observer, overseer and watcher in one; one event of ``script`` for each look."""

    def __init__(self, plan: Plan, *script: Event | Callable[[], Event | None] | None) -> None:
        self.clock = VirtualClock()
        self.script = deque(script)
        self.told: list[tuple[str, m.AnyMessage]] = []
        self.lines: dict[str, Completion] = {}
        self.suspected: list[tuple[str, Epoch]] = []
        self.receipts: list[tuple[Epoch, RestoreReceipt]] = []
        self.phases: list[str] = []
        self.num_aborts = 0
        self.answers: Callable[[str, m.AnyMessage], Event | None] = lambda worker, message: None
        """What a worker says at once when it is asked what it holds."""
        self.then: list[Event] = []
        """What comes when a prompt is run again."""
        self.unreachable: set[Epoch] = set()
        self.controller = Controller(self._links(plan), None, self, self, self)  # type: ignore[arg-type]

    def serve(self, *requests: Request) -> None:
        self.controller.serve(requests)

    def since(self, epoch: int, kind: type[m.Message]) -> list[tuple[str, m.AnyMessage]]:
        """Whom was told what of that kind in an epoch."""
        return [(name, one) for name, one in self.told if isinstance(one, kind) and one.epoch == epoch]

    # Mailbox and peers.

    def take(self, timeout_s: float) -> Event | None:
        if timeout_s == 0.0:
            return None
        self.clock.advance(min(timeout_s, 0.25) if self.script else timeout_s)
        assert self.clock.now() < MOST_S, "the controller still waits, long after the script's end"
        event = self.script.popleft() if self.script else None
        return event() if callable(event) else event

    def post(self, event: Event) -> None:
        self.script.append(event)

    def tell(self, owner: str, message: m.AnyMessage, payload: Sequence[memoryview] = ()) -> Future[None]:
        self.told.append((owner, message))
        answer = self.answers(owner, message) if isinstance(message, m.AskHoldings) else None
        if answer is not None:
            self.script.append(answer)
        if isinstance(message, m.RunPrompt) and message.epoch > 1:
            self.script += self.then
        return Future()

    def abort(self) -> None:
        self.num_aborts += 1

    # Overseer, watcher, observer.

    def why_failed(self) -> str | None:
        return None

    def suspect(self, worker: str, epoch: Epoch, reason: str) -> None:
        self.suspected.append((worker, epoch))

    def link(self, plan: Plan, addresses: Mapping[WorkerName, str]) -> ClusterLinks:
        if plan.epoch in self.unreachable:
            raise TransportError("refused", peer="w1", phase="connect")
        return self._links(plan)

    def resumed(self, epoch: Epoch, receipt: RestoreReceipt) -> None:
        self.receipts.append((epoch, receipt))

    def began(self) -> None:
        self.phases.append("began")

    def stepped(self, microbatch: int, step: int) -> None:
        pass

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def token(self, request_id: str, at_s: float) -> None:
        pass

    def ended(self, completion: Completion, token_times_s: Sequence[float]) -> None:
        self.lines[completion.id] = completion

    def _links(self, plan: Plan) -> ClusterLinks:
        return ClusterLinks(plan, self, self, self.clock)  # type: ignore[arg-type]


def request(name: str = "r", max_tokens: int = 4) -> Request:
    return Request(id=RequestId(name), prompt_tokens=(4, 5), max_tokens=max_tokens)


def first_token(token: int, row_id: int = 1, epoch: int = 1) -> Received:
    return received(m.PromptTokens(epoch=Epoch(epoch), row_ids=(RowId(row_id),), tokens=(token,)))


def next_token(token: int, step: int, row_id: int = 1, epoch: int = 1) -> Received:
    tokens = m.StepTokens(epoch=Epoch(epoch), microbatch=0, step=step, row_ids=(RowId(row_id),), tokens=(token,))
    return received(tokens)


def holdings(worker: str, *rows: HeldRow, epoch: int = 2) -> Received:
    return received(m.Holdings(epoch=Epoch(epoch)), worker, encode_held(rows))


PLAN = msgspec.structs.replace(colocated_plan(2, in_flight=1), replication=1)
NEXT = later(PLAN, 2)
FENCE = (ClusterFenced(plan=NEXT), formed(NEXT))
