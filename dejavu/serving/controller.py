"""The controller: gives requests their rows, collects tokens, ends requests. One thread, driven by events."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from dejavu.control.plan import Plan
from dejavu.engine import messages as m
from dejavu.engine.mailbox import ClusterFenced, ClusterFormed, Event, PeerLost, Received, Wake
from dejavu.errors import DejavuError
from dejavu.ids import Epoch
from dejavu.models.tokenizer import TextCodec
from dejavu.request import Request
from dejavu.serving.cluster_links import ClusterLinks
from dejavu.serving.epochs import Epochs
from dejavu.serving.ledger import Changes, Ledger, Observer
from dejavu.serving.overseer import Meters, Overseer, Unmetered, Unwatched, Watcher
from dejavu.serving.prompts import padded_ids, prompt_row
from dejavu.serving.source import Arrival, Cancellation, ListedSource, Source, Submission
from dejavu.serving.standing import Standing

__all__ = ["Controller", "Observer"]

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_SHORTEST_WAIT_S = 0.0005
_MOST_EVENTS = 256
"""Taken in a row before arrivals are looked at again, however fast more come."""


class Controller:
    """Serves requests over a cluster that is up, in one epoch after the other.

    Args:
        links: to the workers.
        codec: for text and stop strings; None when the model has no tokenizer (texts stay empty).
        observer: told of tokens and endings.
        overseer: keeps the cluster whole.
        watcher: told where the run stands.
        meters: may ask the workers between events.
    """

    def __init__(
        self,
        links: ClusterLinks,
        codec: TextCodec | None,
        observer: Observer,
        overseer: Overseer,
        watcher: Watcher | None = None,
        meters: Meters | None = None,
    ) -> None:
        self._links = links
        self._overseer = overseer
        self._watcher = watcher or Unwatched()
        self._meters = meters or Unmetered()
        self._steps: dict[int, int] = {}
        self._lost: set[str] = set()
        self._epochs = Epochs(links, overseer, self._watcher)
        self._ledger = Ledger(links.plan, codec, observer, progressed=self._epochs.progressed, ended=self._epochs.ended)
        self._start_s = links.clock.monotonic()

    def serve(self, requests: Iterable[Request]) -> float:
        """Every request has ended and its line is with the observer. Returns the seconds that it took.

        Requests are submitted at their ``arrival_s`` from now on. Raises DejavuError when the cluster failed.
        """
        return self.run(ListedSource(requests))

    def run(self, source: Source, *, start_s: float | None = None) -> float:
        """The source has no more and all that came from it has ended. Returns the seconds since ``start_s`` (monotonic
        time; None: now), from which all times count. Raises DejavuError when the cluster failed."""
        self._start_s = self._links.clock.monotonic() if start_s is None else start_s
        self._watcher.began()
        while True:
            self._take_arrivals(source)
            self._run_prompts()
            self._check()
            wait_s = source.wait_s(self._now_s())
            if wait_s is None and not self._ledger.num_open:
                return self._now_s()
            self._take_events(_TICK_S if wait_s is None else min(_TICK_S, max(wait_s, _SHORTEST_WAIT_S)))

    def abandon(self, reason: str, untaken: Iterable[Arrival] = ()) -> None:
        """Every open request has ended with that error, and so have those that arrived and were never taken.

        Once ``run`` has raised."""
        for arrival in untaken:
            if isinstance(arrival, Submission):
                self._ledger.submit(arrival, self._now_s())
        self._ledger.abandon(reason, self._now_s())

    def wake(self) -> None:
        """The controller looks for arrivals soon. Any thread."""
        self._links.mailbox.post(Wake())

    @property
    def links(self) -> ClusterLinks:
        """Those of the epoch in force."""
        return self._links

    @property
    def standing(self) -> Standing:
        """Where requests and rows stand. On the controller's thread only."""
        num_running = len(self._ledger.rows)
        return Standing(
            plan=self._plan,
            is_between=self._epochs.is_between,
            is_changing=self._epochs.is_changing,
            lost=tuple(sorted(self._lost)),
            num_waiting=self._ledger.num_open - num_running,
            num_running=num_running,
            num_rows_taken=self._ledger.admission.num_rows_taken,
        )

    @property
    def _plan(self) -> Plan:
        return self._links.plan

    def _now_s(self) -> float:
        return self._links.clock.monotonic() - self._start_s

    def _take_arrivals(self, source: Source) -> None:
        for arrival in source.take(self._now_s()):
            match arrival:
                case Submission():
                    self._ledger.submit(arrival, self._now_s())
                case Cancellation():
                    self._carry_out(self._ledger.cancel(arrival, self._now_s()))

    def _run_prompts(self) -> None:
        if self._epochs.is_between:
            return
        self._meters.beat(self._links, self._now_s())
        while rows := self._ledger.next_prompt():
            prompt_rows = tuple(map(prompt_row, rows))
            epoch = self._plan.epoch
            if self._plan.mode == "disaggregated":
                self._links.token_stages(m.ExpectRows(epoch=epoch, rows=prompt_rows))
            ids = padded_ids(rows, [self._ledger.rows[row.row_id].tokens for row in rows])
            self._links.prompt_first(m.RunPrompt(epoch=epoch, rows=prompt_rows), (ids,))
            self._watcher.phase("prompt")

    def _take_events(self, wait_s: float) -> None:
        event = self._links.mailbox.take(wait_s)
        for _ in range(_MOST_EVENTS):
            if event is None:
                return
            self._handle(event)
            event = self._links.mailbox.take(0.0)
        if event is not None:
            self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case PeerLost():
                logger.info("lost the link of %s: %s", event.peer, event.reason)
                self._suspect(event.peer, event.epoch, event.reason)
            case ClusterFenced():
                self._epochs.fence(event)
            case ClusterFormed():
                self._enter(event)
            case Received():
                try:
                    self._obey(event)
                finally:
                    event.inbound.release()

    def _enter(self, event: ClusterFormed) -> None:
        """A new epoch begins: the open rows go on in it. Should it end at once, the next one does the same."""
        before, links = self._plan, self._epochs.enter(event)
        if links is None:
            return
        self._links = links
        self._lost.clear()
        self._ledger.enter_epoch(self._plan, self._now_s())
        in_flight = self._plan.token_pipeline.in_flight
        self._steps = {index: step for index, step in self._steps.items() if index < in_flight}
        rows = self._ledger.rows
        if not self._epochs.restore(self._ledger.admission, rows, self._steps):
            return
        if self._plan.revision == before.revision or self._plan.fenced != before.fenced:
            # Nobody has survived anything where the declared state was changed and no worker died on the way.
            for tracked in rows.values():
                tracked.survive(is_another=self._epochs.is_another_repair)

    def _suspect(self, worker: str, epoch: Epoch, reason: str) -> None:
        if epoch == self._plan.epoch:
            self._lost.add(worker)
        self._overseer.suspect(worker, epoch, reason)

    def _obey(self, event: Received) -> None:
        message = event.message
        match message:
            case m.PromptTokens():
                self._epochs.heard()
                self._watcher.phase("handoff")
                changes = self._ledger.first_tokens(message.row_ids, message.tokens, message.logprobs, self._now_s())
                self._carry_out(changes)
            case m.StepTokens():
                self._steps[message.microbatch] = message.step
                self._epochs.heard()
                changes = self._ledger.next_tokens(message.row_ids, message.tokens, message.logprobs, self._now_s())
                self._carry_out(changes)
                self._watcher.stepped(message.microbatch, message.step)
            case m.LinkLost():
                self._suspect(message.peer, message.epoch, message.reason)
            case m.RowsEnded():
                self._ledger.rows_ended(message.row_ids)
            case m.RowsFailed():
                self._carry_out(
                    self._ledger.rows_failed(
                        message.row_ids, message.reason, while_prompt=message.while_prompt, now_s=self._now_s()
                    )
                )
            case _:
                if not self._meters.heard(message, event.inbound.hello.name):
                    logger.error("%s is not for the controller; dropped", type(message).__name__)

    def _carry_out(self, changes: Changes) -> None:
        # Between two epochs nobody can be told; the next one lets go of every row that is not open, and restores those
        # that are.
        if self._epochs.is_between:
            return
        epoch = self._plan.epoch
        if changes.release:
            self._links.row_holders(m.ReleaseRows(epoch=epoch, row_ids=changes.release))
        for rows in changes.admit:
            self._links.token_first(m.AdmitRows(epoch=epoch, rows=rows))

    def _check(self) -> None:
        reason = self._overseer.why_failed()
        if reason is not None:
            raise DejavuError(reason)
