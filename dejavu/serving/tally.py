"""What became of a service's requests, in numbers that add up at every moment. Any thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dejavu.ids import RequestId
from dejavu.request import Completion

Outcome: TypeAlias = Literal["finished", "aborted", "rejected", "failed"]

_OUTCOMES: dict[str, Outcome] = {"stop": "finished", "length": "finished", "abort": "aborted"}
_SHORTEST_PLACE_S, _LONGEST_PLACE_S = 1.0, 60.0
_PACE_WEIGHT = 0.2


def outcome_of(finish_reason: str) -> Outcome:
    """What an ending counts as; a deadline that has passed is a failure."""
    return _OUTCOMES.get(finish_reason, "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """One moment: submitted = finished + aborted + rejected + failed + open, and open = queued + running."""

    submitted: int = 0
    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    failed: int = 0
    queued: int = 0
    """Open requests that never had a row."""
    running: int = 0
    prompt_tokens: int = 0
    """Of the prompts that got a token."""
    generated_tokens: int = 0
    resumed: int = 0
    """Ended requests that had survived a repair."""

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return self.queued + self.running


class Tally:
    """The counts of one service, and who is open."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: set[RequestId] = set()
        self._queued: set[RequestId] = set()
        self._outcomes: dict[Outcome, int] = {"finished": 0, "aborted": 0, "rejected": 0, "failed": 0}
        self._prompt_tokens = self._generated_tokens = self._resumed = 0
        self._last_end_s: float | None = None
        self._interval_s = _SHORTEST_PLACE_S

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def next_place_s(self) -> float:
        """About when the next request will have ended, from how far apart the last ones were; 1 to 60 s."""
        return min(max(self._interval_s, _SHORTEST_PLACE_S), _LONGEST_PLACE_S)

    def opened(self, request_id: RequestId) -> None:
        """The request was taken."""
        with self._changed:
            self._open.add(request_id)
            self._queued.add(request_id)

    def rejected(self) -> None:
        """A request was not taken."""
        with self._changed:
            self._outcomes["rejected"] += 1

    def started(self, request_id: RequestId) -> None:
        """The request has its first row."""
        with self._changed:
            self._queued.discard(request_id)

    def token(self, num_prompt_tokens: int) -> None:
        """A request has one more token; with its first one, its prompt counts too."""
        with self._changed:
            self._generated_tokens += 1
            self._prompt_tokens += num_prompt_tokens

    def ended(self, line: Completion) -> None:
        """The request has its line."""
        with self._changed:
            self._open.discard(line.id)
            self._queued.discard(line.id)
            self._outcomes[outcome_of(line.finish_reason)] += 1
            self._resumed += line.resumed > 0
            if self._last_end_s is not None:
                self._interval_s += _PACE_WEIGHT * (line.end_s - self._last_end_s - self._interval_s)
            # Where nobody is left, the time to the next end will say how long nobody came.
            self._last_end_s = line.end_s if self._open else None
            self._changed.notify_all()

    def wait_empty(self, timeout_s: float) -> tuple[RequestId, ...]:
        """Nothing is open, or so many seconds have passed. Returns what is still open."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open, timeout_s)
            return tuple(self._open)

    def counts(self) -> Counts:
        """The numbers of this moment."""
        with self._changed:
            num_open, num_queued = len(self._open), len(self._queued)
            return Counts(
                submitted=sum(self._outcomes.values()) + num_open,
                **self._outcomes,
                queued=num_queued,
                running=num_open - num_queued,
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._generated_tokens,
                resumed=self._resumed,
            )
