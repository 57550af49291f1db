"""What waits to be done on disk: a bounded queue from any thread to the one that writes."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from dejavu.ids import RowId
from dejavu.kv.chunk import KvMessage
from dejavu.kv.disk_file import DiskError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Write:
    """A message to append; nothing may touch the payload's memory before ``done``."""

    message: KvMessage
    payload: memoryview
    deadline_s: float
    """On the clock of the memory; a message that is still waiting then fails."""
    done: Future[None] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drop:
    """A row whose files shall go."""

    row_id: RowId
    done: Future[None] = field(default_factory=Future)


Job: TypeAlias = Write | Drop


class DiskQueue:
    """Jobs in order. At most ``max_bytes`` of payloads wait, or one larger message alone. Any thread."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._waiting_bytes = 0
        self._closed = False

    def add(self, job: Job, timeout_s: float) -> None:
        """The job will be done. Blocks while there is no room; raises DiskError at the deadline and after ``close``."""
        num_bytes = _payload_bytes(job)
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._has_room(num_bytes), timeout_s):
                message = f"{self._waiting_bytes} bytes still waited to be written after {timeout_s} s"
                raise DiskError(message, path=self._folder, phase="queue")
            if self._closed:
                raise DiskError("nothing is taken any more: it was closed", path=self._folder, phase="queue")
            # Running from the start: a job that could be cancelled would leave its memory to two users.
            job.done.set_running_or_notify_cancel()
            self._jobs.append(job)
            self._waiting_bytes += num_bytes
            self._changed.notify_all()

    def take(self, most_bytes: int) -> tuple[Job, ...]:
        """The next drop, or the next messages up to ``most_bytes`` (at least one); nothing when closed and empty.

        Blocks while there is nothing to do.
        """
        jobs: list[Job] = []
        num_bytes = 0
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            while self._jobs:
                job = self._jobs[0]
                num_bytes += _payload_bytes(job)
                alone = isinstance(job, Drop) or num_bytes > most_bytes
                if jobs and alone:
                    break
                jobs.append(self._jobs.popleft())
                self._waiting_bytes -= _payload_bytes(job)
                if alone:
                    break
            self._changed.notify_all()
        return tuple(jobs)

    def close(self) -> None:
        """Nothing more is taken in; what waits can still be taken out. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _has_room(self, num_bytes: int) -> bool:
        return self._waiting_bytes == 0 or self._waiting_bytes + num_bytes <= self._max_bytes


def _payload_bytes(job: Job) -> int:
    return job.payload.nbytes if isinstance(job, Write) else 0
