"""One request on its way: the tokens so far, when they came, and whether they end it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dejavu.control.admission import Assigned
from dejavu.control.ending import FinishReason, Limits, ending
from dejavu.control.ring import AdmittedRow
from dejavu.models.tokenizer import IncrementalDecoder, TextCodec
from dejavu.request import Completion, Request


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
    """A request that has a row. Mutable; the controller's main thread owns it."""

    request: Request
    limits: Limits
    codec: TextCodec | None
    attempt: int = 1
    resumed: int = 0
    """Repairs that it has survived."""
    strikes: int = 0
    """Epochs in a row that ended with a failure before a new token had come."""
    replayed: int = 0
    """Tokens at the end of ``tokens`` that are being made again, one by one; their users have them already."""
    tokens: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    _decoder: IncrementalDecoder | None = None
    _text: str = ""
    _num_at_repair: int = -1

    def __post_init__(self) -> None:
        if self.request.stop and self.codec is not None:
            self._decoder = IncrementalDecoder(self.codec)

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

    def survive(self, *, is_another: bool) -> None:
        """The request goes on in a new epoch: of another repair than the last one, or of the same."""
        self.resumed += is_another
        self.strikes = self.strikes + 1 if len(self.tokens) == self._num_at_repair else 1
        self._num_at_repair = len(self.tokens)

    def take(self, token: int, now_s: float) -> FinishReason | None:
        """The token is the request's next one. Returns why it ends the request, or None."""
        self.tokens.append(token)
        self.token_times_s.append(now_s)
        reason = ending(token, len(self.tokens), self.limits)
        if self._decoder is not None and token not in self.limits.eos_token_ids:
            self._text += self._decoder.push(token)
            if self._stop_at() is not None:
                return "stop"
        return reason

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

    def _stop_at(self) -> int | None:
        found = [at for stop in self.request.stop if (at := self._text.find(stop)) >= 0]
        return min(found, default=None)

    def _final_text(self) -> str:
        if self.codec is None:
            return ""
        at = self._stop_at()
        return self.codec.decode(self.tokens) if at is None else self._text[:at]


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
