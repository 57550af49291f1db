"""Where the controller's requests come from: a list with arrival times, or whoever submits while it serves."""

from __future__ import annotations

import heapq
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from dejavu.ids import RequestId
from dejavu.request import Completion, Request, TokenLogprobs


class Listener(Protocol):
    """Who follows one request. Calls come on the controller's thread, return soon and do not raise.

    Every token and the ending come exactly once, however often the request was begun anew. The texts of all tokens
    and the ending's rest, joined, are the completion's text; nothing of a stop string is among them.
    """

    def started(self) -> None:
        """The request has its first row."""

    def token(self, token: int, text: str, start: int, logprobs: TokenLogprobs | None) -> None:
        """The next token, and the text that is certain by now; empty while a character or a stop string may begin.

        ``start``: how many characters there were before the token, held back ones included.
        """

    def ended(self, completion: Completion, rest: str, num_cut: int) -> None:
        """The final line, the end of its text that was held back, and how many of its last tokens have no part in
        the text, because a stop string begins before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request that has arrived."""

    request: Request
    listener: Listener | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancellation:
    """A request that is to end now, wherever it is; nothing happens when it has ended."""

    request_id: RequestId
    finish_reason: Literal["abort", "timeout"] = "abort"
    error: str | None = None


Arrival: TypeAlias = Submission | Cancellation


class Source(Protocol):
    """Seconds count from the start of the run."""

    def take(self, now_s: float) -> Sequence[Arrival]:
        """What has come by now and was not taken before, in its order."""

    def wait_s(self, now_s: float) -> float | None:
        """Until something comes by itself (infinite: not before somebody wakes the mailbox); None: nothing will."""


class ListedSource:
    """Requests that are known beforehand, at their ``arrival_s``."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = deque(sorted(requests, key=lambda request: request.arrival_s))

    def take(self, now_s: float) -> Sequence[Arrival]:
        """See ``Source``."""
        taken = []
        while self._requests and self._requests[0].arrival_s <= now_s:
            taken.append(Submission(request=self._requests.popleft()))
        return taken

    def wait_s(self, now_s: float) -> float | None:
        """See ``Source``."""
        return max(self._requests[0].arrival_s - now_s, 0.0) if self._requests else None


class LiveSource:
    """Requests from any thread, each with a deadline if it has one, until it is closed.

    Args:
        wake: makes the controller look here; called without a lock.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._arrivals: deque[Arrival] = deque()
        self._deadlines: list[tuple[float, RequestId]] = []
        self._is_closed = False

    def submit(self, submission: Submission, *, deadline_s: float | None = None) -> None:
        """The controller will have the request, and end it at ``deadline_s`` if it is open then."""
        with self._lock:
            self._arrivals.append(submission)
            if deadline_s is not None:
                heapq.heappush(self._deadlines, (deadline_s, submission.request.id))
        self._wake()

    def cancel(self, cancellation: Cancellation) -> None:
        """The controller will end the request."""
        with self._lock:
            self._arrivals.append(cancellation)
        self._wake()

    def close(self) -> None:
        """Nothing more comes: the run ends when what is open has ended."""
        with self._lock:
            self._is_closed = True
        self._wake()

    def take(self, now_s: float) -> Sequence[Arrival]:
        """See ``Source``."""
        with self._lock:
            arrivals = list(self._arrivals)
            self._arrivals.clear()
            while self._deadlines and self._deadlines[0][0] <= now_s:
                _, request_id = heapq.heappop(self._deadlines)
                arrivals.append(
                    Cancellation(request_id=request_id, finish_reason="timeout", error="its deadline passed")
                )
        return arrivals

    def wait_s(self, now_s: float) -> float | None:
        """See ``Source``. Deadlines are no reason to go on when nothing is open."""
        with self._lock:
            if self._arrivals:
                return 0.0
            if self._is_closed:
                return None
            return max(self._deadlines[0][0] - now_s, 0.0) if self._deadlines else math.inf
