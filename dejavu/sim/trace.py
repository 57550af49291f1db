"""What the workers did when, for a timeline: the first so many pieces of work, so that memory stays bounded."""

from __future__ import annotations

from dataclasses import dataclass

from dejavu.ids import WorkerName


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One piece of work of one worker."""

    worker: WorkerName
    label: str
    kind: str
    start_s: float
    end_s: float


class Trace:
    """Keeps the first ``limit`` spans and counts the others."""

    def __init__(self, limit: int) -> None:
        self.spans: list[TraceSpan] = []
        self.num_dropped = 0
        self._limit = limit

    def add(self, worker: WorkerName, label: str, kind: str, start_s: float, end_s: float) -> None:
        """The span is kept or counted."""
        if len(self.spans) < self._limit:
            self.spans.append(TraceSpan(worker, label, kind, start_s, end_s))
        else:
            self.num_dropped += 1
