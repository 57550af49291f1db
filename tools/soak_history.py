"""What came out of a soak: every token and every ending as the controller told of it, and what is wrong with them."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from dejavu.ids import RequestId
from dejavu.request import Completion, Request, Sampling

Expected = Mapping[RequestId, tuple[int, ...]]
"""Tokens by template."""


@dataclass(slots=True)
class History:
    """An observer that keeps everything; a request that ends twice ends twice in it."""

    tokens: Counter[RequestId] = field(default_factory=Counter)
    endings: list[Completion] = field(default_factory=list)
    longest_pause_s: float = 0.0
    """Between two tokens of whatever requests."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _last_s: float | None = None

    def token(self, request_id: RequestId, at_s: float) -> None:
        """See ``Observer``."""
        with self._lock:
            self.tokens[request_id] += 1
            if self._last_s is not None:
                self.longest_pause_s = max(self.longest_pause_s, at_s - self._last_s)
            self._last_s = at_s

    def ended(self, completion: Completion, token_times_s: Sequence[float]) -> None:
        """See ``Observer``."""
        with self._lock:
            self.endings.append(completion)

    @property
    def num_tokens(self) -> int:
        """Tokens told of so far."""
        with self._lock:
            return self.tokens.total()

    def violations(self, requests: Sequence[Request], expected: Expected) -> list[str]:
        """What must not have happened, one line each: requests lost, doubled, foreign, or with other tokens."""
        ends = Counter(completion.id for completion in self.endings)
        found = [f"{request.id} never ended" for request in requests if request.id not in ends]
        found += [f"{request_id} ended {number} times" for request_id, number in ends.items() if number > 1]
        known = {request.id for request in requests}
        found += [f"{request_id} ended and was never submitted" for request_id in ends if request_id not in known]
        for completion in self.endings:
            if completion.id in known:
                found += self._wrong(completion, expected[template_of(completion.id)])
        return found

    def _wrong(self, completion: Completion, expected: tuple[int, ...]) -> list[str]:
        found = []
        if completion.finish_reason not in ("stop", "length"):
            found.append(f"{completion.id} ended with {completion.finish_reason}: {completion.error}")
        if self.tokens[completion.id] != len(completion.tokens):
            told = self.tokens[completion.id]
            found.append(f"{completion.id} has {len(completion.tokens)} tokens, and {told} were told of")
        pairs = zip(completion.tokens, expected, strict=False)
        differs = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        if differs is not None:
            found.append(f"{completion.id} differs from its new token {differs} on")
        elif completion.finish_reason in ("stop", "length") and len(completion.tokens) != len(expected):
            found.append(f"{completion.id} has {len(completion.tokens)} tokens instead of {len(expected)}")
        return found


def templates(number: int, *, vocab_size: int, max_tokens: int, seed: int) -> list[Request]:
    """Different requests: short and long, greedy and sampled, ending at EOS and not."""
    chooser = random.Random(seed)
    return [
        Request(
            id=RequestId(f"t{index}"),
            prompt_tokens=tuple(chooser.randrange(vocab_size) for _ in range(chooser.choice((1, 2, 5, 17, 40, 64)))),
            max_tokens=chooser.randint(max(1, max_tokens // 4), max_tokens),
            sampling=Sampling(temperature=0.8, top_p=0.95, seed=index) if index % 2 else Sampling(),
            ignore_eos=chooser.random() < 0.5,
        )
        for index in range(number)
    ]


def arrivals(models: Sequence[Request], *, rate: float, until_s: float, seed: int) -> list[Request]:
    """Copies of the templates that arrive all the time, as a Poisson process of so many a second."""
    chooser, requests, at_s = random.Random(seed), [], 0.0
    while (at_s := at_s + chooser.expovariate(rate)) < until_s:
        model = chooser.choice(models)
        request_id = RequestId(f"{model.id}.{len(requests)}")
        requests.append(msgspec.structs.replace(model, id=request_id, arrival_s=at_s))
    return requests


def template_of(request_id: RequestId) -> RequestId:
    """The template that the request is a copy of."""
    return RequestId(request_id.partition(".")[0])
