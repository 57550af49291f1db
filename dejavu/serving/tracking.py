"""One request on its way: the tokens so far, when they came, and whether they end it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dejavu.control.admission import Assigned
from dejavu.control.ending import FinishReason, Limits, ending
from dejavu.control.ring import AdmittedRow
from dejavu.ids import RowId
from dejavu.models.tokenizer import TextCodec
from dejavu.request import Completion, Request, TokenLogprobs
from dejavu.serving.growing_text import GrowingText
from dejavu.serving.source import Listener


def limits_of(request: Request, eos_token_ids: tuple[int, ...]) -> Limits:
    """What ends the request by itself."""
    return Limits(max_tokens=request.max_tokens, eos_token_ids=() if request.ignore_eos else eos_token_ids)


def refusal_of(request: Request, *, max_length: int, vocab_size: int) -> str | None:
    """Why the request cannot be served (limit and value named), or None."""
    length = len(request.prompt_tokens)
    if request.refusal is not None:
        return request.refusal
    if length == 0:
        return "the prompt is empty"
    if request.max_tokens < 1:
        return f"max_tokens is {request.max_tokens}; at least 1 is needed"
    if length + request.max_tokens > max_length:
        return (
            f"prompt of {length} tokens + max_tokens {request.max_tokens} = {length + request.max_tokens} "
            f"exceeds the model's max_length {max_length}"
        )
    worst = max(request.prompt_tokens)
    if worst >= vocab_size or min(request.prompt_tokens) < 0:
        bad = worst if worst >= vocab_size else min(request.prompt_tokens)
        return f"token id {bad} is outside the vocabulary [0, {vocab_size})"
    return None


@dataclass(slots=True, kw_only=True)
class Tracked:
    """A request that is open. Mutable; the controller's main thread owns it."""

    request: Request
    limits: Limits
    codec: TextCodec | None
    listener: Listener | None = None
    row_id: RowId | None = None
    """The row of its present attempt, once its prompt was sent."""
    attempt: int = 1
    has_begun: bool = False
    """Whether its listener has heard that it was started."""
    resumed: int = 0
    """Repairs that it has survived."""
    strikes: int = 0
    """Epochs in a row that ended with a failure before a new token had come."""
    replayed: int = 0
    """Tokens at the end of ``tokens`` that are being made again, one by one; their users have them already."""
    tokens: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    _text: GrowingText | None = None
    _num_at_repair: int = -1

    def __post_init__(self) -> None:
        if self.codec is not None and (self.request.stop or self.listener is not None):
            self._text = GrowingText(self.codec, self.request.stop)

    @property
    def num_done(self) -> int:
        """New tokens that the cluster has made in its present course; the others are known and come again."""
        return len(self.tokens) - self.replayed

    def take_again(self, token: int) -> bool:
        """A token that is known has been made again. Returns whether it is the same one."""
        known = self.tokens[self.num_done]
        self.replayed -= 1
        return token == known

    def admitted(self, row: Assigned, *, ready_stages: int | None = None) -> AdmittedRow:
        """The row as token stage 0 takes it: its next input, and what is known to come after it."""
        done, prompt = self.num_done, self.request.prompt_tokens
        return AdmittedRow(
            row_id=row.row_id,
            microbatch=row.slot.microbatch,
            row_index=row.slot.row_index,
            position=len(prompt) + done - 1,
            token=self.tokens[done - 1] if done else prompt[-1],
            num_generated=done,
            limits=self.limits,
            sampling=self.request.sampling,
            known=tuple(self.tokens[done:]),
            ready_stages=ready_stages,
        )

    def begin_again(self) -> None:
        """The attempt is over: the request waits for another row, with its tokens known."""
        self.attempt += 1
        self.replayed = 0
        self.row_id = None

    def give_up_row(self) -> None:
        """Its row is another's: the request waits for one, with its tokens known. That is no failure of an attempt."""
        self.replayed = 0
        self.row_id = None

    def survive(self, *, is_another: bool) -> None:
        """The request goes on in a new epoch: of another repair than the last one, or of the same."""
        self.resumed += is_another
        self.strikes = self.strikes + 1 if len(self.tokens) == self._num_at_repair else 1
        self._num_at_repair = len(self.tokens)

    def take(self, token: int, now_s: float, logprobs: TokenLogprobs | None = None) -> FinishReason | None:
        """The token is the request's next one, and its listener has it. Returns why it ends the request, or None."""
        self.tokens.append(token)
        self.token_times_s.append(now_s)
        reason = ending(token, len(self.tokens), self.limits)
        text, start, told = self._text, 0, ""
        if text is not None:
            start = text.num_characters
            if token not in self.limits.eos_token_ids:
                text.push(token)
            if reason is not None:
                text.finish()
            if text.before_stop is not None:
                # What is before it comes with the end, which says which tokens are in the text.
                reason = "stop"
            else:
                told = text.take()
        if self.listener is not None:
            self.listener.token(token, told, start, logprobs)
        return reason

    def end(self, completion: Completion) -> None:
        """The listener has the request's line, and the text that was held back."""
        if self.listener is None:
            return
        if self._text is None:
            self.listener.ended(completion, "", 0)
        else:
            self.listener.ended(completion, self._text.rest_of(completion.text), self._text.num_cut)

    def completion(self, finish_reason: str, end_s: float, *, error: str | None = None) -> Completion:
        """The request's line; its text ends before the stop string."""
        return Completion(
            id=self.request.id,
            prompt_tokens=len(self.request.prompt_tokens),
            tokens=tuple(self.tokens),
            text=self._final_text(),
            finish_reason=finish_reason,
            arrival_s=self.request.arrival_s,
            first_token_s=self.token_times_s[0] if self.token_times_s else None,
            end_s=end_s,
            resumed=self.resumed,
            error=error,
            prompt=self.request.prompt_text,
        )

    def _final_text(self) -> str:
        if self.codec is None:
            return ""
        before_stop = None if self._text is None else self._text.before_stop
        return self.codec.decode(self.tokens) if before_stop is None else before_stop


def refused(request: Request, reason: str, now_s: float) -> Completion:
    """The line of a request that was never run."""
    return Completion(
        id=request.id,
        prompt_tokens=len(request.prompt_tokens),
        tokens=(),
        text="",
        finish_reason="error",
        arrival_s=request.arrival_s,
        first_token_s=None,
        end_s=now_s,
        error=reason,
        prompt=request.prompt_text,
    )
