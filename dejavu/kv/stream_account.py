"""What a streamer tells of its jobs: totals, spans for the timeline, and how each job ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace

from dejavu.clock import Clock
from dejavu.errors import Retryable
from dejavu.kv.jobs import Pass
from dejavu.kv.stream import Streamed

_SHORTEST_WAIT_S = 20e-6
"""A shorter wait is counted, but is no span."""


class StreamStalled(Retryable):
    """KV could not leave within the deadline; the message says how much still waits."""


@dataclass(slots=True, kw_only=True)
class StreamerCounters:
    """Since the start. Messages and bytes count when handed over; exposed time is the computation's lost time."""

    bytes_out: int = 0
    chunks: int = 0
    messages: int = 0
    jobs: int = 0
    """Layers of prompt passes, and steps."""
    failed_jobs: int = 0
    sent_again: int = 0
    """Jobs that a receiver has asked for once more."""
    busy_s: float = 0.0
    """Gathering, sealing, waiting for staging and handing over; in the foreground the transfer, too."""
    exposed_s: float = 0.0
    """The computing thread was kept from computing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpan:
    """One part of a job on the timeline, in seconds of ``clock.now``.

    ``stream_out`` (gather, seal, hand over), ``flush`` (handed over until sent), ``stream_wait`` (nothing computed).
    """

    name: str
    made_by: Pass
    start_s: float
    end_s: float
    num_bytes: int = 0
    num_transfers: int = 0


class StreamAccount:
    """Counts and draws what a streamer does. Any thread."""

    def __init__(self, clock: Clock, on_span: Callable[[StreamSpan], None] | None) -> None:
        self._clock = clock
        self._on_span = on_span
        self._lock = threading.Lock()
        self._counters = StreamerCounters()

    @property
    def counters(self) -> StreamerCounters:
        """A copy of the counters."""
        with self._lock:
            return replace(self._counters)

    def count(self, streamed: Streamed, num_jobs: int, busy_s: float) -> None:
        """Jobs were handed over."""
        with self._lock:
            self._counters.jobs += num_jobs
            self._counters.messages += streamed.num_messages
            self._counters.chunks += streamed.num_chunks
            self._counters.bytes_out += streamed.num_bytes
            self._counters.busy_s += busy_s

    def failed(self) -> None:
        """One more job has failed."""
        with self._lock:
            self._counters.failed_jobs += 1

    def sent_again(self, num_jobs: int) -> None:
        """A receiver has asked for these once more."""
        with self._lock:
            self._counters.sent_again += num_jobs

    @contextmanager
    def exposed(self, made_by: Pass) -> Iterator[None]:
        """The body keeps the computing thread from computing."""
        start_s, from_s = self._clock.now(), self._clock.monotonic()
        try:
            yield
        finally:
            exposed_s = self._clock.monotonic() - from_s
            with self._lock:
                self._counters.exposed_s += exposed_s
            if exposed_s > _SHORTEST_WAIT_S:
                self.span("stream_wait", made_by, start_s, self._clock.now())

    def span(self, name: str, made_by: Pass, start_s: float, end_s: float, streamed: Streamed | None = None) -> None:
        """The part of a job is drawn."""
        if self._on_span is None:
            return
        num_bytes, num_transfers = (0, 0) if streamed is None else (streamed.num_bytes, streamed.num_messages)
        self._on_span(
            StreamSpan(
                name=name,
                made_by=made_by,
                start_s=start_s,
                end_s=end_s,
                num_bytes=num_bytes,
                num_transfers=num_transfers,
            )
        )


class JobOutcome:
    """Counts a job's messages down and keeps the first error. Any thread."""

    def __init__(self, num_sends: int) -> None:
        self._lock = threading.Lock()
        self._num_left = num_sends
        self.error: Exception | None = None

    def count_down(self, sent: Future[None]) -> bool:
        """One message is done; True for the last."""
        error = failure_of(sent)
        with self._lock:
            self.error = self.error or error
            self._num_left -= 1
            return self._num_left == 0


def failure_of(sent: Future[None]) -> Exception | None:
    """Why a message that is done was not sent, or None."""
    if sent.cancelled():
        return StreamStalled("a send was cancelled")
    error = sent.exception()
    return error if error is None or isinstance(error, Exception) else StreamStalled(repr(error))
