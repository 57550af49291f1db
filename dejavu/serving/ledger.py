"""Every open request and its row: facts in, what the stages must be told out. No thread, no clock, no link."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dejavu.control.admission import Admission, Assigned
from dejavu.control.plan import Plan
from dejavu.control.ring import AdmittedRow
from dejavu.ids import RequestId, RowId
from dejavu.models.tokenizer import TextCodec
from dejavu.request import Completion, TokenLogprobs
from dejavu.serving.source import Cancellation, Submission
from dejavu.serving.tracking import Tracked, limits_of, refusal_of, refused

logger = logging.getLogger(__name__)

_MOST_ATTEMPTS = 3
_MOST_STRIKES = 5
"""So many failures in a row without a token between them end the requests that were under way: one of them may be
what kills the workers, and the others must be served."""


class Observer(Protocol):
    """Who is told, on the controller's thread, as the run goes on."""

    def token(self, request_id: RequestId, at_s: float) -> None:
        """One more token has come."""

    def ended(self, completion: Completion, token_times_s: Sequence[float]) -> None:
        """The request has its final line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What the stages must be told."""

    release: tuple[RowId, ...] = ()
    """Rows that every stage lets go."""
    admit: tuple[tuple[AdmittedRow, ...], ...] = ()
    """Groups of rows that join their microbatches."""


class Ledger:
    """The controller's requests and rows, through all epochs. Times are seconds of the run.

    Args:
        codec: for text and stop strings; None when the model has no tokenizer (texts stay empty).
        observer: told of tokens and endings.
        progressed: told of each row that has a token.
        ended: told of each row whose request has ended, by a token or without one.
    """

    def __init__(
        self,
        plan: Plan,
        codec: TextCodec | None,
        observer: Observer,
        *,
        progressed: Callable[[RowId], None],
        ended: Callable[[RowId], None],
    ) -> None:
        self.admission = Admission.of(plan)
        self.rows: dict[RowId, Tracked] = {}
        """The open requests whose prompts were sent, by their rows."""
        self._model = plan.model
        self._codec = codec
        self._observer = observer
        self._progressed = progressed
        self._ended = ended
        self._open: dict[RequestId, Tracked] = {}
        self._given_back: set[RowId] = set()
        """Rows whose places are free as soon as their last token has come."""
        self._leaving: set[RowId] = set()
        """Rows whose requests were cancelled while their prompts were computed: they are released after that."""

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def submit(self, submission: Submission, now_s: float) -> None:
        """The request waits for a row, or has ended with the reason why it cannot be served."""
        request, model = submission.request, self._model
        reason = refusal_of(request, max_length=model.max_length, vocab_size=model.vocab_size)
        if reason is None:
            limits = limits_of(request, model.eos_token_ids)
            tracked = Tracked(request=request, limits=limits, codec=self._codec, listener=submission.listener)
            self._open[request.id] = tracked
            self.admission.enqueue(request)
            return
        logger.warning("request %s refused: %s", request.id, reason)
        line = refused(request, reason, now_s)
        try:
            self._observer.ended(line, ())
        finally:
            if submission.listener is not None:
                submission.listener.ended(line, "", 0)

    def cancel(self, cancellation: Cancellation, now_s: float) -> Changes:
        """The request has ended; what its row is to the stages decides when the row is given back."""
        tracked = self._open.get(cancellation.request_id)
        if tracked is None:
            return Changes()
        row_id, due = tracked.row_id, self.admission.cancel(tracked.request.id)
        is_prompting = row_id is not None and self.admission.is_prompting(row_id)
        if row_id is not None:
            self.admission.withdraw(row_id)
            self._finish(row_id, cancellation.finish_reason, now_s, error=cancellation.error)
        else:
            self._end(tracked, cancellation.finish_reason, now_s, error=cancellation.error)
        admit = () if due is None else self._prompt_done((due,), ())
        if row_id is None and due is not None:
            # No stage has ever heard of it.
            self.admission.free(due)
        if is_prompting and row_id is not None:
            self._leaving.add(row_id)
            return Changes(admit=admit)
        return Changes(release=() if row_id is None else (row_id,), admit=admit)

    def next_prompt(self) -> tuple[Assigned, ...]:
        """The rows of the next prompt microbatch, under way from now on; empty when there is none to run yet."""
        rows = self.admission.next_prompt()
        for row in rows:
            if row.row_id not in self.rows:
                self._begin(self._open[row.request.id], row)
        return rows

    def first_tokens(
        self, row_ids: Sequence[RowId], tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], now_s: float
    ) -> Changes:
        """A prompt microbatch is done."""
        ended = self.next_tokens(row_ids, tokens, logprobs, now_s).release
        admit = self._prompt_done(row_ids, [row_id for row_id in row_ids if row_id in self.rows])
        return Changes(release=(*ended, *self._left(row_ids)), admit=admit)

    def next_tokens(
        self, row_ids: Sequence[RowId], tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], now_s: float
    ) -> Changes:
        """Tokens go to their requests. A row that ends is released everywhere: the token stages cannot know of an
        ending by its first token or by a stop string, and the release marks the row's late chunks as stale."""
        released = []
        for row_id, token, likely in zip(row_ids, tokens, logprobs or [None] * len(tokens), strict=True):
            tracked = self.rows.get(row_id)
            if tracked is None:
                continue
            self._progressed(row_id)
            if tracked.replayed:
                if not tracked.take_again(token):
                    logger.warning("request %s: a token came out otherwise when it was made again", tracked.request.id)
                continue
            reason = tracked.take(token, now_s, likely)
            self._observer.token(tracked.request.id, now_s)
            if reason is not None:
                self._finish(row_id, reason, now_s)
                released.append(row_id)
        return Changes(release=tuple(released))

    def rows_ended(self, row_ids: Sequence[RowId]) -> None:
        """The places are free, but for a row whose last token is still on its way: a repair in between needs it."""
        for row_id in row_ids:
            if row_id in self.rows:
                self._given_back.add(row_id)
            elif self.admission.assigned(row_id) is not None:
                self.admission.free(row_id)

    def rows_failed(self, row_ids: Sequence[RowId], reason: str, *, while_prompt: bool, now_s: float) -> Changes:
        """The rows cannot go on: their requests get other rows, or have had enough of them."""
        # A row that stage 0 has given back ended properly, and its last token is still on the way.
        known = [row_id for row_id in row_ids if row_id in self.rows and row_id not in self._given_back]
        admit = self._prompt_done(row_ids, ()) if while_prompt else ()
        left = self._left(row_ids) if while_prompt else ()
        for row_id in known:
            tracked = self.rows[row_id]
            if tracked.attempt < _MOST_ATTEMPTS:
                logger.warning("request %s is computed again: %s", tracked.request.id, reason)
                self.admission.requeue(row_id, len(tracked.tokens))
                tracked.begin_again()
                del self.rows[row_id]
            else:
                self.admission.withdraw(row_id)
                self._finish(row_id, "error", now_s, error=reason)
        return Changes(release=(*known, *left), admit=admit)

    def enter_epoch(self, plan: Plan, now_s: float) -> None:
        """Before the open rows are restored: what the former epoch owed is void, and hopeless requests have ended.

        Those were under way in several failures in a row, and made no token between them. Rows have their places in
        the plan's pipelines; where it has fewer, requests without one wait again, with their tokens known.
        """
        self._given_back.clear()
        self._leaving.clear()
        for row_id, tracked in list(self.rows.items()):
            if tracked.strikes >= _MOST_STRIKES and row_id not in self.admission.unsent:
                reason = f"the cluster failed {tracked.strikes} times in a row while this request was under way"
                self._finish(row_id, "error", now_s, error=reason)
        open_rows = {row_id: len(tracked.tokens) for row_id, tracked in self.rows.items()}
        for row_id in self.admission.reshape(plan, open_rows):
            displaced = self.rows.pop(row_id, None)
            if displaced is not None:
                displaced.give_up_row()

    def abandon(self, reason: str, now_s: float) -> None:
        """Every open request has ended with that error. Nothing else may be asked of this object then."""
        for tracked in list(self._open.values()):
            try:
                self._end(tracked, "error", now_s, error=reason)
            # An observer may be what has failed, and the others wait for their ends.
            except Exception:
                logger.exception("the end of request %s was not recorded", tracked.request.id)
        self.rows.clear()

    def _begin(self, tracked: Tracked, row: Assigned) -> None:
        tracked.row_id = row.row_id
        self.rows[row.row_id] = tracked
        if tracked.listener is not None and not tracked.has_begun:
            tracked.listener.started()
        tracked.has_begun = True

    def _prompt_done(
        self, row_ids: Sequence[RowId], continuing: Sequence[RowId]
    ) -> tuple[tuple[AdmittedRow, ...], ...]:
        groups = self.admission.prompt_done(row_ids, continuing)
        return tuple(tuple(self.rows[row.row_id].admitted(row) for row in group) for group in groups)

    def _left(self, row_ids: Sequence[RowId]) -> tuple[RowId, ...]:
        """Those of the rows that were only waiting for the end of their prompt to be released."""
        left = self._leaving.intersection(row_ids)
        self._leaving -= left
        return tuple(sorted(left))

    def _finish(self, row_id: RowId, reason: str, now_s: float, *, error: str | None = None) -> None:
        tracked = self.rows.pop(row_id)
        self._ended(row_id)
        if row_id in self._given_back:
            self._given_back.discard(row_id)
            self.admission.free(row_id)
        self._end(tracked, reason, now_s, error=error)

    def _end(self, tracked: Tracked, reason: str, now_s: float, *, error: str | None) -> None:
        del self._open[tracked.request.id]
        line = tracked.completion(reason, now_s, error=error)
        try:
            self._observer.ended(line, tracked.token_times_s)
        finally:
            # Whatever an observer's fault is: its user waits for the answer.
            tracked.end(line)
