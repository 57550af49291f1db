"""Requests that wait for rows, and whose turn it is. Pure.

In order of arrival, but for two things: prompts of like length share a microbatch, and long prompts take turns with
short ones, so that neither waits for more than one of the other where rows are given one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from dejavu.ids import RequestId
from dejavu.request import Request

_WINDOW = 32
"""Among so many that may share a microbatch those of like length are looked for."""


class RequestQueue:
    """Mutable; its owner's thread.

    Args:
        prompt_tokens: a longer prompt shares a microbatch with no other; None: none is too long.
        takes_turns: whether rows are given one by one: a whole microbatch at a time is taken as they come.
    """

    def __init__(self, *, prompt_tokens: int | None, takes_turns: bool) -> None:
        self.prompt_tokens = prompt_tokens
        self._takes_turns = takes_turns
        self._requests: deque[Request] = deque()
        self._alone: set[RequestId] = set()
        self._was_long = False

    def __len__(self) -> int:
        return len(self._requests)

    def append(self, request: Request) -> None:
        """The request waits behind all others."""
        self._requests.append(request)

    def put_first(self, request: Request) -> None:
        """The request is the next one, and will share a microbatch with no other."""
        self._requests.appendleft(request)
        self._alone.add(request.id)

    def put_back(self, requests: Sequence[Request]) -> None:
        """The requests are the next ones, in this order."""
        self._requests.extendleft(reversed(requests))

    def remove(self, request_id: RequestId) -> None:
        """The request waits no longer, if it did."""
        self._alone.discard(request_id)
        self._requests = deque(request for request in self._requests if request.id != request_id)

    def pick(self, most: int) -> list[Request]:
        """The request whose turn it is and, of those next in line that may join it, the nearest to it in length."""
        if not self._requests or most == 0:
            return []
        head = self._pop_next()
        if head.id in self._alone:
            self._alone.discard(head.id)
            return [head]
        if self._was_long and self._takes_turns:
            return [head]
        length = len(head.prompt_tokens)
        joining = ((place, request) for place, request in enumerate(self._requests) if self._may_join(request))
        like = sorted(islice(joining, _WINDOW), key=lambda one: abs(len(one[1].prompt_tokens) - length))
        chosen = sorted(like[: most - 1], key=lambda one: one[0])
        for place, _ in reversed(chosen):
            del self._requests[place]
        return [head, *(request for _, request in chosen)]

    def _pop_next(self) -> Request:
        """The head, unless it and the one before it are both long: then the first that is short has its turn."""
        place = 0
        if self._takes_turns and self._was_long and self._is_long(self._requests[0]):
            # However many long ones are before it: they would all be run first.
            waiting = enumerate(self._requests)
            place = next((index for index, request in waiting if not self._is_long(request)), 0)
        head = self._requests[place]
        del self._requests[place]
        self._was_long = self._is_long(head)
        return head

    def _may_join(self, request: Request) -> bool:
        is_too_long = self._takes_turns and self._is_long(request)
        return request.id not in self._alone and not is_too_long

    def _is_long(self, request: Request) -> bool:
        return self.prompt_tokens is not None and len(request.prompt_tokens) > self.prompt_tokens
