"""Jobs on their way from the computing thread to the one that streams: a bounded queue, and a fence for its readers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from dejavu.kv.jobs import StreamJob
from dejavu.kv.stream_account import StreamStalled


class JobQueue:
    """At most ``max_jobs`` jobs wait. A job is *pending* from ``put`` or ``begin`` until ``finish``. Any thread."""

    def __init__(self, max_jobs: int) -> None:
        if max_jobs < 1:
            raise ValueError(f"a queue of {max_jobs} jobs takes none; at least 1")
        self._max_jobs = max_jobs
        self._changed = threading.Condition()
        self._jobs: deque[StreamJob] = deque()
        self._gathering: StreamJob | None = None
        self._num_pending = 0
        self._closed = False

    def put(self, job: StreamJob, timeout_s: float) -> None:
        """The job will be taken. Blocks while the queue is full; raises StreamStalled in the end, or when closed."""
        with self._changed:
            self._wait(lambda: self._closed or len(self._jobs) < self._max_jobs, timeout_s)
            self._check_open()
            self._jobs.append(job)
            self._num_pending += 1
            self._changed.notify_all()

    def check_open(self) -> None:
        """Raises StreamStalled when the queue is closed."""
        with self._changed:
            self._check_open()

    def take(self) -> StreamJob | None:
        """The next job, which counts as being read until ``gathered``; None when closed and empty. Blocks."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._jobs)
            if not self._jobs:
                return None
            self._gathering = self._jobs.popleft()
            self._changed.notify_all()
            return self._gathering

    def gathered(self) -> None:
        """The job that was taken last has been read: its cells may be written to."""
        with self._changed:
            self._gathering = None
            self._changed.notify_all()

    def begin(self) -> None:
        """A job that was never queued is pending."""
        with self._changed:
            self._num_pending += 1

    def finish(self) -> None:
        """A pending job is sent or has failed."""
        with self._changed:
            self._num_pending -= 1
            self._changed.notify_all()

    def settle(self, places: frozenset[int], timeout_s: float) -> None:
        """Nobody reads these rows of the pool, and what was queued of them will not leave. Raises StreamStalled."""
        with self._changed:
            self._jobs = deque(job.without(places) if job.reads(places) else job for job in self._jobs)
            reading = self._gathering
            if reading is not None and reading.reads(places):
                self._wait(lambda: self._gathering is not reading, timeout_s)

    def drain(self, timeout_s: float) -> None:
        """Nothing is pending. Raises StreamStalled at the deadline."""
        with self._changed:
            self._wait(lambda: self._num_pending == 0, timeout_s)

    def close(self) -> tuple[StreamJob, ...]:
        """Nothing more is taken in; the jobs that were still queued. Idempotent."""
        with self._changed:
            self._closed = True
            abandoned = tuple(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
        return abandoned

    def _check_open(self) -> None:
        if self._closed:
            raise StreamStalled("nothing is taken any more: the streamer is closed")

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        if not self._changed.wait_for(condition, timeout_s):
            raise StreamStalled(f"{self._num_pending} jobs ({len(self._jobs)} queued) had not left after {timeout_s} s")
