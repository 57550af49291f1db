"""The controller: gives requests their rows, collects tokens, ends requests. One thread, driven by events."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from dejavu.control.admission import Admission, Assigned
from dejavu.control.ring import AdmittedRow
from dejavu.engine import messages as m
from dejavu.engine.mailbox import Event, PeerLost, Received
from dejavu.errors import DejavuError
from dejavu.ids import RequestId, RowId
from dejavu.models.tokenizer import TextCodec
from dejavu.request import Completion, Request
from dejavu.serving.cluster_links import ClusterLinks
from dejavu.serving.tracking import Tracked, limits_of, refusal_of, refused

logger = logging.getLogger(__name__)

_MOST_ATTEMPTS = 3
_TICK_S = 0.25
_LOST_GRACE_S = 3.0
"""How long a lost link may wait for the owner of the process to say what happened to it."""


class Observer(Protocol):
    """Who is told, on the controller's thread, as the run goes on."""

    def token(self, request_id: RequestId, at_s: float) -> None:
        """One more token has come."""

    def ended(self, completion: Completion, token_times_s: Sequence[float]) -> None:
        """The request has its final line."""


class Controller:
    """Serves requests over a cluster that is up.

    Args:
        links: to the workers.
        codec: for text and stop strings; None when the model has no tokenizer (texts stay empty).
        observer: told of tokens and endings.
        failure: why the cluster cannot go on, once somebody knows; looked at between events.
    """

    def __init__(
        self, links: ClusterLinks, codec: TextCodec | None, observer: Observer, failure: Callable[[], str | None]
    ) -> None:
        self._links = links
        self._plan = links.plan
        self._codec = codec
        self._observer = observer
        self._admission = Admission.of(links.plan)
        self._rows: dict[RowId, Tracked] = {}
        self._attempts: dict[RequestId, int] = {}
        self._start_s = links.clock.monotonic()
        self._num_open = 0
        self._failure = failure
        self._lost: tuple[float, str] | None = None

    def serve(self, requests: Iterable[Request]) -> float:
        """Every request has ended and its line is with the observer. Returns the seconds that it took.

        Requests are submitted at their ``arrival_s`` from now on. Raises DejavuError when the cluster failed.
        """
        self._start_s = self._links.clock.monotonic()
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
        while rows := self._admission.next_prompt():
            prompt_rows = tuple(_prompt_row(row) for row in rows)
            for row in rows:
                self._track(row)
            epoch = self._plan.epoch
            if self._plan.mode == "disaggregated":
                self._links.token_stages(m.ExpectRows(epoch=epoch, rows=prompt_rows))
            ids = _padded_ids(rows).view(np.uint8).reshape(-1).data
            self._links.prompt_first(m.RunPrompt(epoch=epoch, rows=prompt_rows), (ids,))

    def _track(self, row: Assigned) -> None:
        request = row.request
        self._rows[row.row_id] = Tracked(
            request=request,
            limits=limits_of(request, self._plan.model.eos_token_ids),
            codec=self._codec,
            attempt=self._attempts.get(request.id, 0) + 1,
        )

    def _take_events(self, wait_s: float) -> None:
        event = self._links.mailbox.take(wait_s)
        while event is not None:
            self._handle(event)
            event = self._links.mailbox.take(0.0)

    def _handle(self, event: Event) -> None:
        if isinstance(event, PeerLost):
            logger.warning("lost %s: %s", event.peer, event.reason)
            self._lost = self._lost or (self._links.clock.monotonic(), f"worker {event.peer} is gone: {event.reason}")
        elif isinstance(event, Received):
            try:
                self._obey(event.message)
            finally:
                event.inbound.release()

    def _obey(self, message: m.AnyMessage) -> None:
        match message:
            case m.PromptTokens():
                self._first_tokens(message)
            case m.StepTokens():
                self._next_tokens(message.row_ids, message.tokens)
            case m.RowsEnded():
                for row_id in message.row_ids:
                    if self._admission.assigned(row_id) is not None:
                        self._admission.free(row_id)
            case m.RowsFailed():
                self._rows_failed(message)
            case _:
                logger.error("%s is not for the controller; dropped", type(message).__name__)

    def _first_tokens(self, message: m.PromptTokens) -> None:
        self._next_tokens(message.row_ids, message.tokens)
        self._prompt_done(message.row_ids, [row_id for row_id in message.row_ids if row_id in self._rows])

    def _prompt_done(self, row_ids: Sequence[RowId], continuing: Sequence[RowId]) -> None:
        for group in self._admission.prompt_done(row_ids, continuing):
            rows = tuple(self._admitted(row) for row in group)
            self._links.token_first(m.AdmitRows(epoch=self._plan.epoch, rows=rows))

    def _admitted(self, row: Assigned) -> AdmittedRow:
        tracked = self._rows[row.row_id]
        return AdmittedRow(
            row_id=row.row_id,
            microbatch=row.slot.microbatch,
            row_index=row.slot.row_index,
            position=len(row.request.prompt_tokens),
            token=tracked.tokens[-1],
            num_generated=len(tracked.tokens),
            limits=tracked.limits,
            sampling=row.request.sampling,
        )

    def _next_tokens(self, row_ids: Sequence[RowId], tokens: Sequence[int]) -> None:
        """Tokens go to their requests. A row that ends is released everywhere: the token stages cannot know of an
        ending by its first token or by a stop string, and the release marks the row's late chunks as stale."""
        now_s = self._now_s()
        released = []
        for row_id, token in zip(row_ids, tokens, strict=True):
            tracked = self._rows.get(row_id)
            if tracked is None:
                continue
            reason = tracked.take(token, now_s)
            self._observer.token(tracked.request.id, now_s)
            if reason is not None:
                self._finish(row_id, reason)
                released.append(row_id)
        self._release(released)

    def _rows_failed(self, message: m.RowsFailed) -> None:
        # A row that stage 0 has given back ended properly, and its last token is still on the way.
        known = [
            row_id
            for row_id in message.row_ids
            if row_id in self._rows and self._admission.assigned(row_id) is not None
        ]
        if message.while_prompt:
            self._prompt_done(message.row_ids, ())
        for row_id in known:
            tracked = self._rows[row_id]
            if tracked.attempt < _MOST_ATTEMPTS:
                logger.warning("request %s is computed again: %s", tracked.request.id, message.reason)
                self._attempts[tracked.request.id] = tracked.attempt
                self._admission.requeue(row_id)
                del self._rows[row_id]
            else:
                self._admission.withdraw(row_id)
                self._finish(row_id, "error", error=message.reason)
        self._release(known)

    def _finish(self, row_id: RowId, reason: str, *, error: str | None = None) -> None:
        tracked = self._rows.pop(row_id)
        self._attempts.pop(tracked.request.id, None)
        self._num_open -= 1
        self._observer.ended(tracked.completion(reason, self._now_s(), error=error), tracked.token_times_s)

    def _release(self, row_ids: Sequence[RowId]) -> None:
        if row_ids:
            self._links.row_holders(m.ReleaseRows(epoch=self._plan.epoch, row_ids=tuple(row_ids)))

    def _check(self) -> None:
        reason = self._failure()
        if reason is not None:
            raise DejavuError(reason)
        if self._lost is not None and self._links.clock.monotonic() - self._lost[0] > _LOST_GRACE_S:
            raise DejavuError(self._lost[1])


def _prompt_row(row: Assigned) -> m.PromptRow:
    sampling = row.request.sampling
    return m.PromptRow(
        row.row_id,
        row.slot.microbatch,
        row.slot.row_index,
        len(row.request.prompt_tokens),
        None if sampling.is_greedy else sampling,
    )


def _padded_ids(rows: Sequence[Assigned]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Token ids int32 [B, T], zeros behind each row's end."""
    ids = np.zeros((len(rows), max(len(row.request.prompt_tokens) for row in rows)), dtype=np.int32)
    for index, row in enumerate(rows):
        ids[index, : len(row.request.prompt_tokens)] = row.request.prompt_tokens
    return ids
