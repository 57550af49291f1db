"""Prompt layers that have left, kept for a while for a receiver that asks for them again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from dejavu.ids import RowId
from dejavu.kv.jobs import LayerJob, StreamJob
from dejavu.kv.layout import LayerRange


class RetainedLayers:
    """The newest layers, at most ``max_bytes`` of memory that they keep alive. Any thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._jobs: deque[LayerJob] = deque()
        self._num_bytes = 0

    def keep(self, jobs: Sequence[StreamJob]) -> None:
        """Those of the jobs that are layers are kept, and the oldest are let go."""
        if self._max_bytes == 0:
            return
        with self._lock:
            for job in jobs:
                if isinstance(job, LayerJob) and not job.is_repeat:
                    self._jobs.append(job)
                    self._num_bytes += job.nbytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._jobs.popleft().nbytes

    def find(self, row_id: RowId, layers: LayerRange) -> tuple[LayerJob, ...] | None:
        """The row's part of these layers, or None when one of them is not there."""
        found: dict[int, LayerJob] = {}
        with self._lock:
            for job in self._jobs:
                if job.layer in layers and row_id in job.row_ids:
                    found[job.layer] = _part(job, row_id)
        return tuple(found.values()) if len(found) == len(layers) else None


def _part(job: LayerJob, row_id: RowId) -> LayerJob:
    index = job.row_ids.index(row_id)
    rows = slice(index, index + 1)
    keys_BHTD, values_BHTD = job.keys_BHTD[rows], job.values_BHTD[rows]
    return replace(job, keys_BHTD=keys_BHTD, values_BHTD=values_BHTD, rows=job.rows[rows], is_repeat=True)
