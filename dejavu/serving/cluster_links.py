"""The controller's side of the cluster: sends to stages by their place, asks every worker and waits for answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dejavu.clock import Clock
from dejavu.control.plan import Plan
from dejavu.engine import messages as m
from dejavu.engine.mailbox import ClusterFenced, Event, Mailbox, PeerLost, Received
from dejavu.engine.peers import Peers
from dejavu.errors import DejavuError, Retryable
from dejavu.ids import WorkerName
from dejavu.transport.base import Buffer


class ClusterInterrupted(Retryable):
    """The epoch is over: what was going on is begun anew in the next one."""


class NoAnswer(DejavuError):
    """Workers that were asked are gone or silent."""

    def __init__(self, message: str, workers: Iterable[str]) -> None:
        super().__init__(message)
        self.workers = tuple(workers)


class ClusterLinks:
    """Links from the controller to the workers of one plan."""

    def __init__(self, plan: Plan, peers: Peers, mailbox: Mailbox, clock: Clock) -> None:
        self.plan = plan
        self.mailbox = mailbox
        self.clock = clock
        self._peers = peers

    def prompt_first(self, message: m.AnyMessage, payload: Sequence[Buffer] = ()) -> None:
        """Prompt stage 0 is told."""
        self._peers.tell(self.plan.prompt_pipeline.stages[0].worker, message, payload)

    def token_first(self, message: m.AnyMessage) -> None:
        """Token stage 0 is told."""
        self._peers.tell(self.plan.token_pipeline.stages[0].worker, message)

    def token_stages(self, message: m.AnyMessage) -> None:
        """Every token stage is told: it has rows to expect."""
        for stage in self.plan.token_pipeline.stages:
            self._peers.tell(stage.worker, message)

    def row_holders(self, message: m.AnyMessage) -> None:
        """Every stage that keeps something of a row which must be let go is told."""
        plan = self.plan
        # A stage that swaps would bring in rows that have ended.
        keeps_all = plan.mode == "disaggregated" or plan.stream_to is not None or plan.is_replicated or plan.swapping
        stages = plan.token_pipeline.stages if keeps_all else plan.token_pipeline.stages[:1]
        for stage in (*stages, *plan.memory_stages):
            self._peers.tell(stage.worker, message)

    def worker(self, name: WorkerName, message: m.AnyMessage) -> None:
        """That worker is told."""
        self._peers.tell(name, message)

    def every_worker(self, message: m.AnyMessage) -> None:
        """Every worker of the plan is told."""
        for worker in self.plan.workers:
            self._peers.tell(worker, message)

    def ask(
        self, message: m.AnyMessage, workers: Iterable[str], answer: type[m.Message], *, timeout_s: float
    ) -> dict[str, Received]:
        """Each worker's answer by name; the caller releases them. Other events that come meanwhile come again later.

        Raises NoAnswer when one is lost or silent: what did answer is not enough to go on; ClusterInterrupted when
        the epoch ends before.
        """
        missing = set(workers)
        for worker in missing:
            self._peers.tell(worker, message)
        answers: dict[str, Received] = {}
        others: list[Event] = []
        try:
            self._collect(missing, answers, others, answer, timeout_s)
        except DejavuError:
            for received in answers.values():
                received.inbound.release()
            raise
        finally:
            for event in others:
                self.mailbox.post(event)
        return answers

    def _collect(
        self,
        missing: set[str],
        answers: dict[str, Received],
        others: list[Event],
        answer: type[m.Message],
        timeout_s: float,
    ) -> None:
        deadline_s = self.clock.monotonic() + timeout_s
        while missing:
            left_s = deadline_s - self.clock.monotonic()
            event: Event | None = self.mailbox.take(max(left_s, 0.001))
            if isinstance(event, Received) and isinstance(event.message, answer):
                name = event.inbound.hello.name
                answers[name] = event
                missing.discard(name)
            elif isinstance(event, ClusterFenced) and event.plan.epoch > self.plan.epoch:
                others.append(event)
                raise ClusterInterrupted(f"epoch {event.plan.epoch} has begun")
            elif isinstance(event, PeerLost) and event.peer in missing:
                others.append(event)
                raise NoAnswer(f"{event.peer} is gone and cannot answer: {event.reason}", (event.peer,))
            elif event is not None:
                others.append(event)
            if missing and left_s <= 0:
                raise NoAnswer(f"no answer from {', '.join(sorted(missing))} in {timeout_s:g} s", missing)

    def stop_workers(self) -> None:
        """Every worker has been told to end cleanly."""
        self.every_worker(m.Stop(epoch=self.plan.epoch))

    def abort(self) -> None:
        """The links are gone now."""
        self._peers.abort()

    def close(self, timeout_s: float) -> None:
        """The links are gone, what was sent is received."""
        self._peers.close(timeout_s)
