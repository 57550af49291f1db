"""The controller: gives requests their rows, collects tokens, ends requests. One thread, driven by events."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from dejavu.control.admission import Admission, Assigned
from dejavu.control.plan import Plan
from dejavu.engine import messages as m
from dejavu.engine.mailbox import ClusterFenced, ClusterFormed, Event, PeerLost, Received
from dejavu.errors import DejavuError
from dejavu.ids import RequestId, RowId
from dejavu.models.tokenizer import TextCodec
from dejavu.request import Completion, Request
from dejavu.serving.cluster_links import ClusterLinks
from dejavu.serving.epochs import Epochs
from dejavu.serving.overseer import Overseer, Unwatched, Watcher
from dejavu.serving.tracking import Tracked, limits_of, refusal_of, refused

logger = logging.getLogger(__name__)

_MOST_ATTEMPTS = 3
_MOST_STRIKES = 5
"""So many failures in a row without a token between them end the requests that were under way: one of them may be
what kills the workers, and the others must be served."""
_TICK_S = 0.25


class Observer(Protocol):
    """Who is told, on the controller's thread, as the run goes on."""

    def token(self, request_id: RequestId, at_s: float) -> None:
        """One more token has come."""

    def ended(self, completion: Completion, token_times_s: Sequence[float]) -> None:
        """The request has its final line."""


class Controller:
    """Serves requests over a cluster that is up, in one epoch after the other.

    Args:
        links: to the workers.
        codec: for text and stop strings; None when the model has no tokenizer (texts stay empty).
        observer: told of tokens and endings.
        overseer: keeps the cluster whole.
        watcher: told where the run stands.
    """

    def __init__(
        self,
        links: ClusterLinks,
        codec: TextCodec | None,
        observer: Observer,
        overseer: Overseer,
        watcher: Watcher | None = None,
    ) -> None:
        self._links = links
        self._codec = codec
        self._observer = observer
        self._overseer = overseer
        self._watcher = watcher or Unwatched()
        self._admission = Admission.of(links.plan)
        self._rows: dict[RowId, Tracked] = {}
        self._waiting: dict[RequestId, Tracked] = {}
        """Requests whose attempt failed and which wait for another row."""
        self._given_back: set[RowId] = set()
        """Rows whose places are free as soon as their last token has come."""
        self._steps: dict[int, int] = {}
        self._epochs = Epochs(links, overseer, self._watcher)
        self._start_s = links.clock.monotonic()
        self._num_open = 0

    def serve(self, requests: Iterable[Request]) -> float:
        """Every request has ended and its line is with the observer. Returns the seconds that it took.

        Requests are submitted at their ``arrival_s`` from now on. Raises DejavuError when the cluster failed.
        """
        self._start_s = self._links.clock.monotonic()
        self._watcher.began()
        arrivals = deque(sorted(requests, key=lambda request: request.arrival_s))
        while arrivals or self._num_open:
            while arrivals and arrivals[0].arrival_s <= self._now_s():
                self._submit(arrivals.popleft())
            self._run_prompts()
            self._check()
            wait_s = _TICK_S
            if arrivals:
                wait_s = min(wait_s, max(arrivals[0].arrival_s - self._now_s(), 0.0005))
            if arrivals or self._num_open:
                self._take_events(wait_s)
        return self._now_s()

    @property
    def links(self) -> ClusterLinks:
        """Those of the epoch in force."""
        return self._links

    @property
    def _plan(self) -> Plan:
        return self._links.plan

    def _now_s(self) -> float:
        return self._links.clock.monotonic() - self._start_s

    def _submit(self, request: Request) -> None:
        model = self._plan.model
        reason = refusal_of(request, max_length=model.max_length, vocab_size=model.vocab_size)
        if reason is not None:
            logger.warning("request %s refused: %s", request.id, reason)
            self._observer.ended(refused(request, reason, self._now_s()), ())
            return
        self._num_open += 1
        self._admission.enqueue(request)

    def _run_prompts(self) -> None:
        if self._epochs.is_between:
            return
        while rows := self._admission.next_prompt():
            prompt_rows = tuple(_prompt_row(row) for row in rows)
            for row in rows:
                self._track(row)
            epoch = self._plan.epoch
            if self._plan.mode == "disaggregated":
                self._links.token_stages(m.ExpectRows(epoch=epoch, rows=prompt_rows))
            ids = self._padded_ids(rows).view(np.uint8).reshape(-1).data
            self._links.prompt_first(m.RunPrompt(epoch=epoch, rows=prompt_rows), (ids,))
            self._watcher.phase("prompt")

    def _track(self, row: Assigned) -> None:
        if row.row_id in self._rows:
            return
        request = row.request
        tracked = self._waiting.pop(request.id, None)
        if tracked is None:
            limits = limits_of(request, self._plan.model.eos_token_ids)
            tracked = Tracked(request=request, limits=limits, codec=self._codec)
        self._rows[row.row_id] = tracked

    def _padded_ids(self, rows: Sequence[Assigned]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        """Token ids int32 [B, T], zeros behind each row's end."""
        ids = np.zeros((len(rows), max(row.length for row in rows)), dtype=np.int32)
        for index, row in enumerate(rows):
            known = self._rows[row.row_id].tokens[: row.num_known]
            ids[index, : row.length] = (*row.request.prompt_tokens, *known)
        return ids

    def _take_events(self, wait_s: float) -> None:
        event = self._links.mailbox.take(wait_s)
        while event is not None:
            self._handle(event)
            event = self._links.mailbox.take(0.0)

    def _handle(self, event: Event) -> None:
        match event:
            case PeerLost():
                logger.info("lost the link of %s: %s", event.peer, event.reason)
                self._overseer.suspect(event.peer, event.epoch, event.reason)
            case ClusterFenced():
                self._epochs.fence(event)
            case ClusterFormed():
                self._enter(event)
            case Received():
                try:
                    self._obey(event.message)
                finally:
                    event.inbound.release()

    def _enter(self, event: ClusterFormed) -> None:
        """A new epoch begins: the open rows go on in it. Should it end at once, the next one does the same."""
        links = self._epochs.enter(event)
        if links is None:
            return
        self._links = links
        self._given_back.clear()
        self._end_hopeless()
        if self._epochs.restore(self._admission, self._rows, self._steps):
            for tracked in self._rows.values():
                tracked.survive(is_another=self._epochs.is_another_repair)

    def _end_hopeless(self) -> None:
        """Requests that were under way in several failures in a row, and made no token between them, end."""
        for row_id, tracked in list(self._rows.items()):
            if tracked.strikes >= _MOST_STRIKES and row_id not in self._admission.unsent:
                reason = f"the cluster failed {tracked.strikes} times in a row while this request was under way"
                self._finish(row_id, "error", error=reason)

    def _obey(self, message: m.AnyMessage) -> None:
        match message:
            case m.PromptTokens():
                self._first_tokens(message)
            case m.StepTokens():
                self._steps[message.microbatch] = message.step
                self._next_tokens(message.row_ids, message.tokens)
                self._watcher.stepped(message.microbatch, message.step)
            case m.LinkLost():
                self._overseer.suspect(message.peer, message.epoch, message.reason)
            case m.RowsEnded():
                self._rows_ended(message.row_ids)
            case m.RowsFailed():
                self._rows_failed(message)
            case _:
                logger.error("%s is not for the controller; dropped", type(message).__name__)

    def _rows_ended(self, row_ids: Sequence[RowId]) -> None:
        """The places are free, but for a row whose last token is still on its way: a repair in between needs it."""
        for row_id in row_ids:
            if row_id in self._rows:
                self._given_back.add(row_id)
            elif self._admission.assigned(row_id) is not None:
                self._admission.free(row_id)

    def _first_tokens(self, message: m.PromptTokens) -> None:
        self._next_tokens(message.row_ids, message.tokens)
        self._watcher.phase("handoff")
        self._prompt_done(message.row_ids, [row_id for row_id in message.row_ids if row_id in self._rows])

    def _prompt_done(self, row_ids: Sequence[RowId], continuing: Sequence[RowId]) -> None:
        for group in self._admission.prompt_done(row_ids, continuing):
            rows = tuple(self._rows[row.row_id].admitted(row) for row in group)
            self._links.token_first(m.AdmitRows(epoch=self._plan.epoch, rows=rows))

    def _next_tokens(self, row_ids: Sequence[RowId], tokens: Sequence[int]) -> None:
        """Tokens go to their requests. A row that ends is released everywhere: the token stages cannot know of an
        ending by its first token or by a stop string, and the release marks the row's late chunks as stale."""
        now_s = self._now_s()
        self._epochs.heard()
        released = []
        for row_id, token in zip(row_ids, tokens, strict=True):
            tracked = self._rows.get(row_id)
            if tracked is None:
                continue
            self._epochs.progressed(row_id)
            if tracked.replayed:
                if not tracked.take_again(token):
                    logger.warning("request %s: a token came out otherwise when it was made again", tracked.request.id)
                continue
            reason = tracked.take(token, now_s)
            self._observer.token(tracked.request.id, now_s)
            if reason is not None:
                self._finish(row_id, reason)
                released.append(row_id)
        self._release(released)

    def _rows_failed(self, message: m.RowsFailed) -> None:
        # A row that stage 0 has given back ended properly, and its last token is still on the way.
        known = [row_id for row_id in message.row_ids if row_id in self._rows and row_id not in self._given_back]
        if message.while_prompt:
            self._prompt_done(message.row_ids, ())
        for row_id in known:
            tracked = self._rows[row_id]
            if tracked.attempt < _MOST_ATTEMPTS:
                logger.warning("request %s is computed again: %s", tracked.request.id, message.reason)
                tracked.attempt += 1
                tracked.replayed = 0
                self._admission.requeue(row_id, len(tracked.tokens))
                self._waiting[tracked.request.id] = self._rows.pop(row_id)
            else:
                self._admission.withdraw(row_id)
                self._finish(row_id, "error", error=message.reason)
        self._release(known)

    def _finish(self, row_id: RowId, reason: str, *, error: str | None = None) -> None:
        tracked = self._rows.pop(row_id)
        self._epochs.progressed(row_id)
        self._num_open -= 1
        if row_id in self._given_back:
            self._given_back.discard(row_id)
            self._admission.free(row_id)
        self._observer.ended(tracked.completion(reason, self._now_s(), error=error), tracked.token_times_s)

    def _release(self, row_ids: Sequence[RowId]) -> None:
        # Between two epochs nobody can be told; the next one lets go of every row that is not open.
        if row_ids and not self._epochs.is_between:
            self._links.row_holders(m.ReleaseRows(epoch=self._plan.epoch, row_ids=tuple(row_ids)))

    def _check(self) -> None:
        reason = self._overseer.why_failed()
        if reason is not None:
            raise DejavuError(reason)


def _prompt_row(row: Assigned) -> m.PromptRow:
    sampling = row.request.sampling
    return m.PromptRow(
        row.row_id,
        row.slot.microbatch,
        row.slot.row_index,
        row.length,
        None if sampling.is_greedy else sampling,
    )
