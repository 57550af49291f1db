"""Streams prompt layers beside the computation: layer l leaves while l+1 computes (DejaVu §4.1, optimisation 2)."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from torch import Tensor

from dejavu.clock import Clock, SystemClock
from dejavu.errors import Retryable
from dejavu.ids import RowId
from dejavu.kv.device import Copier, CpuCopier, Mark
from dejavu.kv.flush import Sender
from dejavu.kv.route import RowSpan
from dejavu.kv.staging import StagingRing
from dejavu.kv.stream import Streamed, StreamSetup, stream_out

logger = logging.getLogger(__name__)


class StreamStalled(Retryable):
    """Layers could not leave within the deadline; the message says how many still wait."""


@dataclass(slots=True, kw_only=True)
class StreamerCounters:
    """Since the start. Messages and bytes count when handed over; exposed time is the computation's lost time."""

    bytes_out: int = 0
    chunks: int = 0
    messages: int = 0
    layers: int = 0
    failed_layers: int = 0
    busy_s: float = 0.0
    """Gathering, sealing, waiting for staging and handing over, beside the computation."""
    exposed_s: float = 0.0
    """The computing thread blocked in ``submit`` and ``drain``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    layer: int
    keys_BHTD: Tensor
    values_BHTD: Tensor
    rows: tuple[RowSpan, ...]
    after: Mark

    @property
    def row_ids(self) -> tuple[RowId, ...]:
        return tuple(span.row_id for span in self.rows)


class Streamer:
    """A daemon thread that runs ``stream_out`` for each submitted layer, in order.

    At most ``max_queued_layers`` layers wait, plus what the staging ring holds: a network that is slower than the
    computation blocks ``submit``, and memory stays bounded. ``on_error(error, row_ids)`` is called once for each
    layer that failed, on the streamer's or the transport's thread, and must return at once; so must
    ``on_span(name, start, end, num_bytes)``, called with ``stream_out`` (the thread's work) and ``flush`` (handed
    over until sent), in seconds of ``clock.now``.
    """

    def __init__(
        self,
        setup: StreamSetup,
        staging: StagingRing,
        sender: Sender,
        *,
        on_error: Callable[[Exception, tuple[RowId, ...]], None],
        on_span: Callable[[str, float, float, int], None] | None = None,
        copier: Copier | None = None,
        clock: Clock | None = None,
        max_queued_layers: int = 4,
        timeout_s: float = 60.0,
    ) -> None:
        if max_queued_layers < 1:
            raise ValueError(f"a queue of {max_queued_layers} layers takes none; at least 1")
        self._setup = setup
        self._staging = staging
        self._sender = sender
        self._on_error = on_error
        self._on_span = on_span
        self._copier = copier or CpuCopier()
        self._clock = clock or SystemClock()
        self._max_queued_layers = max_queued_layers
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._queue: deque[_Layer] = deque()
        self._num_pending = 0
        self._closing = False
        self._counters = StreamerCounters()
        self._thread = threading.Thread(target=self._run, name="kv-streamer", daemon=True)
        self._thread.start()

    def submit(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor, rows: Sequence[RowSpan]) -> None:
        """The layer is queued; its tensors are read later and may not be written to again.

        Blocks while the queue is full. Raises StreamStalled at the deadline or when the streamer is closed.
        """
        queued = _Layer(
            layer=layer, keys_BHTD=keys_BHTD, values_BHTD=values_BHTD, rows=tuple(rows), after=self._copier.mark()
        )
        with self._changed:
            self._wait(lambda: self._closing or len(self._queue) < self._max_queued_layers, self._timeout_s)
            if self._closing:
                raise StreamStalled(f"layer {layer} cannot be queued: the streamer is closed")
            self._queue.append(queued)
            self._num_pending += 1
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Every submitted layer has been sent (not necessarily received) or reported as failed.

        Raises StreamStalled at the deadline.
        """
        self._wait(lambda: self._num_pending == 0, timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """The thread has ended; layers still queued are reported to ``on_error``. Idempotent.

        Raises StreamStalled when the thread does not end in time.
        """
        with self._changed:
            self._closing = True
            abandoned = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for queued in abandoned:
            error = StreamStalled(f"layer {queued.layer} was still queued when the streamer closed")
            self._finish(queued.layer, queued.row_ids, error)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise StreamStalled(f"the streamer was still sending after {timeout_s} s")

    @property
    def counters(self) -> StreamerCounters:
        """A copy of the counters."""
        with self._changed:
            return replace(self._counters)

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """The condition held; the time it took is exposed time."""
        start_s = self._clock.monotonic()
        with self._changed:
            met = self._changed.wait_for(condition, timeout_s)
            self._counters.exposed_s += self._clock.monotonic() - start_s
            if not met:
                raise StreamStalled(
                    f"{self._num_pending} layers ({len(self._queue)} queued) had not left after {timeout_s} s"
                )

    def _run(self) -> None:
        while self._stream_next():
            pass

    def _stream_next(self) -> bool:
        """The next layer has been handed over or reported; False when the streamer is closed."""
        queued = self._next()
        if queued is None:
            return False
        start_s, busy_from_s = self._clock.now(), self._clock.monotonic()
        try:
            streamed = self._stream(queued)
        except Exception as error:  # Any failure must reach on_error: a dead thread would stall every drain.
            self._finish(queued.layer, queued.row_ids, error)
            return True
        with self._changed:
            self._count(streamed, self._clock.monotonic() - busy_from_s)
        handed_over_s = self._clock.now()
        self._span("stream_out", start_s, handed_over_s, streamed.num_bytes)
        self._follow(queued.layer, queued.row_ids, streamed, handed_over_s)
        return True

    def _next(self) -> _Layer | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._queue)
            if not self._queue:
                return None
            queued = self._queue.popleft()
            self._changed.notify_all()
            return queued

    def _stream(self, queued: _Layer) -> Streamed:
        return stream_out(
            queued.layer,
            queued.keys_BHTD,
            queued.values_BHTD,
            queued.rows,
            self._setup,
            self._staging,
            self._sender,
            copier=self._copier,
            after=queued.after,
            timeout_s=self._timeout_s,
        )

    def _follow(self, layer: int, row_ids: tuple[RowId, ...], streamed: Streamed, handed_over_s: float) -> None:
        """The layer will be finished when the last of its messages has been sent or has failed."""
        # Takes no tensors: they are staged by now, and a callback would keep them until the network is done.
        waiting = _Outcome(len(streamed.sends))

        def one_done(sent: Future[None]) -> None:
            if waiting.count_down(sent):
                self._span("flush", handed_over_s, self._clock.now(), streamed.num_bytes)
                self._finish(layer, row_ids, waiting.error)

        for sent in streamed.sends:
            sent.add_done_callback(one_done)
        if not streamed.sends:
            self._finish(layer, row_ids, None)

    def _finish(self, layer: int, row_ids: tuple[RowId, ...], error: Exception | None) -> None:
        if error is not None:
            logger.warning("layer %s of rows %s was not streamed: %s", layer, row_ids, error)
            self._on_error(error, row_ids)
        with self._changed:
            self._num_pending -= 1
            self._counters.failed_layers += error is not None
            self._changed.notify_all()

    def _count(self, streamed: Streamed, busy_s: float) -> None:
        self._counters.layers += 1
        self._counters.messages += len(streamed.sends)
        self._counters.chunks += streamed.num_chunks
        self._counters.bytes_out += streamed.num_bytes
        self._counters.busy_s += busy_s

    def _span(self, name: str, start_s: float, end_s: float, num_bytes: int) -> None:
        if self._on_span is not None:
            self._on_span(name, start_s, end_s, num_bytes)


class _Outcome:
    """Counts a layer's messages down and keeps the first error. Any thread."""

    def __init__(self, num_sends: int) -> None:
        self._lock = threading.Lock()
        self._num_left = num_sends
        self.error: Exception | None = None

    def count_down(self, sent: Future[None]) -> bool:
        """One message is done; True for the last."""
        error = None if sent.cancelled() else sent.exception()
        if sent.cancelled():
            error = StreamStalled("a send was cancelled")
        with self._lock:
            if error is not None and self.error is None:
                self.error = error if isinstance(error, Exception) else StreamStalled(repr(error))
            self._num_left -= 1
            return self._num_left == 0
