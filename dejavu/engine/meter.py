"""What a stage counts about itself while it serves."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dejavu.control.plan import Place
from dejavu.kv.stream_account import StreamerCounters
from dejavu.kv.swap_counters import SwapCounters
from dejavu.report.counters import RehearsalCounters, SwapTotals, WorkerCounters
from dejavu.report.spans import SpanRecorder

_SHORTEST_WAIT_S = 0.0005
"""A shorter wait is not worth a span."""


class Meter:
    """Computation, waits and their spans on the main thread. One owner, no lock."""

    def __init__(self, recorder: SpanRecorder) -> None:
        self._recorder = recorder
        self._compute_s = 0.0
        self._first_s: float | None = None
        self._last_s = 0.0
        self._steps = 0
        self._prompts = 0

    @contextmanager
    def computing(self, name: str, **args: int) -> Iterator[None]:
        """The body is computation of the kind ``name`` (``prompt`` or ``step``)."""
        start_s = self._recorder.now()
        try:
            yield
        finally:
            end_s = self._recorder.now()
            self._recorder.add(name, "compute", start_s, end_s - start_s, **args)
            self._compute_s += end_s - start_s
            self._first_s = start_s if self._first_s is None else self._first_s
            self._last_s = end_s
            self._steps += name == "step"
            self._prompts += name == "prompt"

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The body waits for work; recorded once serving has begun."""
        start_s = self._recorder.now()
        yield
        waited_s = self._recorder.now() - start_s
        if self._first_s is not None and waited_s > _SHORTEST_WAIT_S:
            self._recorder.add("wait", "wait", start_s, waited_s)

    def counters(
        self,
        name: str,
        place: Place,
        *,
        handoffs: Sequence[StreamerCounters],
        copiers: Sequence[StreamerCounters],
        are_replicas: bool,
        kv: dict[str, int],
        weight_bytes: int,
        pool_bytes: int,
        swap: SwapCounters,
        rehearsal: RehearsalCounters | None = None,
    ) -> WorkerCounters:
        """The totals so far. Copies count as replicated where the plan replicates, else as streamed."""
        layers = place.stage.layers
        streamed = _transferred(handoffs if are_replicas else (*handoffs, *copiers))
        replicated = _transferred(copiers if are_replicas else ())
        return WorkerCounters(
            name=name,
            pipeline=place.pipeline.kind,
            stage=place.stage.index,
            layers=(layers.start, layers.stop),
            compute_s=self._compute_s,
            window_s=self._last_s - self._first_s if self._first_s is not None else 0.0,
            steps=self._steps,
            prompts=self._prompts,
            stream_bytes=streamed[0],
            stream_hidden_s=streamed[1],
            stream_exposed_s=streamed[2],
            replica_bytes=replicated[0],
            replica_hidden_s=replicated[1],
            replica_exposed_s=replicated[2],
            kv=kv,
            peak_rss_bytes=peak_rss_bytes(),
            weight_bytes=weight_bytes,
            kv_pool_bytes=pool_bytes,
            swap=SwapTotals(
                bytes_in=swap.bytes_in,
                bytes_out=swap.bytes_out,
                unused_bytes=swap.unused_bytes,
                busy_s=swap.busy_s,
                own_s=swap.own_s,
                wait_s=swap.wait_s,
                steps=swap.steps,
                waits=swap.waits,
            ),
            rehearsal=rehearsal,
        )


def _transferred(streamers: Sequence[StreamerCounters]) -> tuple[int, float, float]:
    """Bytes, hidden seconds, exposed seconds."""
    exposed_s = sum(one.exposed_s for one in streamers)
    hidden_s = max(sum(one.busy_s for one in streamers) - exposed_s, 0.0)
    return sum(one.bytes_out for one in streamers), hidden_s, exposed_s


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
