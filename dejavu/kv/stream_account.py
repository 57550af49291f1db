"""What a streamer tells of its jobs: totals, spans for the timeline, and how each job ended."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

from dejavu.errors import Retryable
from dejavu.kv.jobs import Pass


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
