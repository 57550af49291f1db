"""A request and what became of it: the vocabulary shared by workload, serving, engine and report."""

from __future__ import annotations

import msgspec

from dejavu.ids import RequestId


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen. ``temperature`` 0 is greedy; draws depend on (seed, position) alone."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    top_logprobs: int | None = None
    """So many of the likeliest tokens are told beside each token, with their log-probabilities; None: not even its."""

    @property
    def is_greedy(self) -> bool:
        """True when no random draw is made."""
        return self.temperature == 0.0

    @property
    def is_plain(self) -> bool:
        """True for a greedy choice of which nothing more is to be told."""
        return self.is_greedy and self.top_logprobs is None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to answer. ``arrival_s`` counts from the start of the run."""

    id: RequestId
    prompt_tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    arrival_s: float = 0.0
    prompt_text: str | None = None
    refusal: str | None = None
    """Why this request cannot be served, when that is known before it is submitted (e.g. an empty prompt)."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """How likely a token was, before temperature, top-k and top-p; natural logarithms."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens of its place and theirs, likeliest first; as many as were asked for."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``completions.jsonl``. Times are seconds since the start of the run."""

    id: RequestId
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    """``stop`` (EOS or stop string), ``length``, ``abort`` (given up by its user), ``timeout`` or ``error``."""
    arrival_s: float
    first_token_s: float | None
    end_s: float
    resumed: int = 0
    error: str | None = None
    prompt: str | None = None
