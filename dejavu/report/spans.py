"""What a worker did when: cheap records for the timeline, bounded in number."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

import msgspec

from dejavu.clock import Clock

Category: TypeAlias = Literal["compute", "stream", "swap", "replicate", "wait", "recover", "load"]
"""What kind of work a span is; a row of the timeline each, in this order."""

CATEGORIES: tuple[Category, ...] = get_args(Category)

ArgValue: TypeAlias = int | float | str


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One piece of work. ``start_s`` is wall-clock time (seconds since the Unix epoch); ``args`` says on what."""

    name: str
    category: Category
    start_s: float
    duration_s: float
    args: dict[str, ArgValue] = {}

    @property
    def end_s(self) -> float:
        """Wall-clock time at which it ended."""
        return self.start_s + self.duration_s


class SpanRecorder:
    """The newest ``limit`` spans of one process; any thread may add. Older ones are dropped and counted."""

    def __init__(self, clock: Clock, limit: int = 200_000) -> None:
        if limit < 1:
            raise ValueError(f"a recorder of {limit} spans holds nothing; give at least 1")
        self._clock = clock
        # Wall time is read once: later steps of the machine's clock would make neighbouring spans overlap.
        self._wall_offset_s = clock.now() - clock.monotonic()
        self._spans: deque[Span] = deque(maxlen=limit)
        self._lock = threading.Lock()
        self._num_dropped = 0

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def num_dropped(self) -> int:
        """Spans lost to the limit since the start."""
        return self._num_dropped

    def now(self) -> float:
        """Wall-clock seconds that never go back: the time to give to ``add``."""
        return self._wall_offset_s + self._clock.monotonic()

    def add(self, name: str, category: Category, start_s: float, duration_s: float, /, **args: ArgValue) -> None:
        """The span is recorded; ``start_s`` comes from ``now``."""
        self._append(Span(name, category, start_s, duration_s, args))

    @contextmanager
    def span(self, name: str, category: Category, /, **args: ArgValue) -> Iterator[dict[str, ArgValue]]:
        """The body is recorded as one span, also when it raises. It may add to the yielded args (e.g. bytes moved)."""
        start_s = self.now()
        try:
            yield args
        finally:
            self._append(Span(name, category, start_s, self.now() - start_s, args))

    def snapshot(self) -> list[Span]:
        """The spans held, in the order in which they ended."""
        with self._lock:
            return list(self._spans)

    def drain(self) -> list[Span]:
        """The spans held; the recorder is empty. What a worker sends to the controller every now and then."""
        with self._lock:
            spans = list(self._spans)
            self._spans.clear()
        return spans

    def _append(self, span: Span) -> None:
        with self._lock:
            self._num_dropped += len(self._spans) == self._spans.maxlen
            self._spans.append(span)
