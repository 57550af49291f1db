"""Streams KV beside the computation, or before it goes on, as the streaming level says (DejaVu §4.1)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from torch import Tensor

from dejavu.clock import Clock, SystemClock
from dejavu.ids import RowId
from dejavu.kv.chunk import StepMark
from dejavu.kv.device import Copier, CpuCopier
from dejavu.kv.flush import Sender
from dejavu.kv.job_queue import JobQueue
from dejavu.kv.jobs import LayerJob, Pass, RowsJob, StreamJob, merged_regions
from dejavu.kv.layout import LayerRange
from dejavu.kv.levels import StreamingLevel
from dejavu.kv.pool import KvPool
from dejavu.kv.retained import RetainedLayers
from dejavu.kv.route import RowSpan
from dejavu.kv.staging import StagingRing
from dejavu.kv.stream import Streamed, stream_out_rows, stream_regions
from dejavu.kv.stream_account import (
    JobOutcome,
    StreamAccount,
    StreamerCounters,
    StreamSpan,
    StreamStalled,
    failure_of,
)
from dejavu.kv.stream_setup import PoolRow, StreamSetup

logger = logging.getLogger(__name__)


class Streamer:
    """Takes what a pass has made, on the computing thread; what is not awaited leaves on a daemon thread, in order.

    At most ``max_queued_jobs`` jobs wait, plus what the staging ring holds: a network that is slower than the
    computation blocks it, and memory stays bounded. ``on_error(error, row_ids)`` is called once for each job that
    failed, on any thread, and must return at once; so must ``on_span``.

    Args:
        patience_s: how long a step's cells wait for a free buffer before they are reported as failed, or for a place
            in the queue before StreamStalled; None: as long as everything else.
        retain_bytes: so much of the prompt layers that were sent last is kept for receivers that ask again.
    """

    def __init__(
        self,
        setup: StreamSetup,
        staging: StagingRing,
        sender: Sender,
        *,
        on_error: Callable[[Exception, tuple[RowId, ...]], None],
        on_span: Callable[[StreamSpan], None] | None = None,
        level: StreamingLevel = StreamingLevel.full,
        copier: Copier | None = None,
        clock: Clock | None = None,
        max_queued_jobs: int = 4,
        retain_bytes: int = 0,
        timeout_s: float = 60.0,
        patience_s: float | None = None,
    ) -> None:
        self._setup = setup
        self._staging = staging
        self._sender = sender
        self._on_error = on_error
        self._level = level
        self._copier = copier or CpuCopier()
        self._clock = clock or SystemClock()
        self._account = StreamAccount(self._clock, on_span)
        self._timeout_s = timeout_s
        self._patience_s = timeout_s if patience_s is None else patience_s
        self._queue = JobQueue(max_queued_jobs)
        self._held: list[StreamJob] = []
        self._retained = RetainedLayers(retain_bytes)
        self._thread = threading.Thread(target=self._run, name="kv-streamer", daemon=True)
        self._thread.start()

    @property
    def level(self) -> StreamingLevel:
        """The level in force."""
        return self._level

    def set_level(self, level: StreamingLevel) -> None:
        """From the next pass on. On the computing thread, between passes."""
        self._level = level

    def submit(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor, rows: Sequence[RowSpan]) -> None:
        """A layer of a prompt pass will leave; its tensors are read later and may not be written to again.

        Blocks while the queue is full. Raises StreamStalled at the deadline or when the streamer is closed.
        """
        if self._level is StreamingLevel.naive:
            # Pieces as they lie in a cache; the models' tensors may be views in which each position is apart.
            with self._account.exposed("prompt"):
                keys_BHTD, values_BHTD = keys_BHTD.contiguous(), values_BHTD.contiguous()
        after = self._copier.mark()
        self._take(LayerJob(layer=layer, keys_BHTD=keys_BHTD, values_BHTD=values_BHTD, rows=tuple(rows), after=after))

    def submit_rows(
        self,
        pool: KvPool,
        rows: Sequence[PoolRow],
        *,
        made_by: Pass,
        layers: LayerRange | None = None,
        mark: StepMark | None = None,
    ) -> None:
        """Positions of the pool's rows will leave; ``settle`` before others are written there. See ``submit``.

        ``mark`` goes with the last message of the job.
        """
        layers = layers or self._setup.source.layers
        after = self._copier.mark()
        self._take(RowsJob(pool=pool, rows=tuple(rows), layers=layers, after=after, made_by=made_by, mark=mark))

    def end_pass(self) -> None:
        """The prompt pass is over: what its level sends only now has been sent, or has been reported as failed."""
        held, self._held = self._held, []
        if held:
            self._send_now(held)

    def abandon_pass(self) -> None:
        """The prompt pass has failed: what was to be sent at its end is forgotten."""
        self._held = []

    def send_again(self, jobs: Sequence[StreamJob]) -> None:
        """The jobs leave in the background, whatever the level. See ``submit``."""
        self._account.sent_again(len(jobs))
        for job in jobs:
            self._enqueue(job)

    def retained(self, row_id: RowId, layers: LayerRange) -> tuple[LayerJob, ...] | None:
        """The row's layers as they were sent, or None when not all of them are kept any more."""
        return self._retained.find(row_id, layers)

    def settle(self, places: frozenset[int]) -> None:
        """Nothing reads these rows of the pool any more, and what was still queued of them will not leave.

        Raises StreamStalled when a job that reads them does not end in time.
        """
        with self._account.exposed("step"):
            self._queue.settle(places, self._timeout_s)

    def drain(self, timeout_s: float) -> None:
        """Everything submitted has been sent (not necessarily received) or reported as failed.

        Raises StreamStalled at the deadline.
        """
        self._queue.drain(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """The thread has ended; jobs still queued are reported to ``on_error``. Idempotent.

        Raises StreamStalled when the thread does not end in time.
        """
        for job in self._queue.close():
            self._finish(job.row_ids, StreamStalled("it was still queued when the streamer closed"))
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise StreamStalled(f"the streamer was still sending after {timeout_s} s")

    @property
    def counters(self) -> StreamerCounters:
        """A copy of the counters."""
        return self._account.counters

    def _take(self, job: StreamJob) -> None:
        """By its level, the job leaves later, now, or at the end of the pass."""
        level, is_prompt = self._level, job.made_by == "prompt"
        if level is StreamingLevel.off:
            return
        self._queue.check_open()
        if is_prompt:
            if level.prompts_in_background:
                self._enqueue(job)
            else:
                self._held.append(job)
        elif not level.steps_in_background:
            self._send_now([job])
        elif self._copier.gathers_at_once:
            self._queue.begin()
            with self._account.exposed(job.made_by):
                self._send_later(job)
        else:
            self._enqueue(job)

    def _enqueue(self, job: StreamJob) -> None:
        with self._account.exposed(job.made_by):
            self._queue.put(job, self._patience_s if job.made_by == "step" else self._timeout_s)

    def _send_now(self, jobs: Sequence[StreamJob]) -> None:
        """The jobs, all of one pass, have been sent or reported as failed: the computation waits for it."""
        made_by, row_ids = jobs[0].made_by, tuple(dict.fromkeys(row_id for job in jobs for row_id in job.row_ids))
        self._queue.begin()
        start_s, from_s = self._clock.now(), self._clock.monotonic()
        error: Exception | None = None
        with self._account.exposed(made_by):
            try:
                streamed = self._stream(jobs, merged=self._level.merges)
                handed_over_s = self._clock.now()
                self._account.span("stream_out", made_by, start_s, handed_over_s, streamed)
                if wait(streamed.sends, self._timeout_s).not_done:
                    raise StreamStalled(f"{streamed.num_bytes} bytes had not left after {self._timeout_s} s")
                error = next(filter(None, (failure_of(sent) for sent in streamed.sends)), None)
                self._account.span("flush", made_by, handed_over_s, self._clock.now(), streamed)
                self._account.count(streamed, len(jobs), self._clock.monotonic() - from_s)
            except Exception as raised:  # As in the background: on_error is told, whatever it is.
                error = raised
        self._finish(row_ids, error)

    def _run(self) -> None:
        while (job := self._queue.take()) is not None:
            self._send_later(job)
            # Staged by now: its tensors need not live until the network is done.
            del job
            self._queue.gathered()

    def _send_later(self, job: StreamJob) -> None:
        """The job has been handed over or reported."""
        start_s, from_s = self._clock.now(), self._clock.monotonic()
        made_by, row_ids = job.made_by, job.row_ids
        try:
            streamed = self._stream((job,), merged=True)
        except Exception as error:  # Any failure must reach on_error: a dead thread would stall every drain.
            self._finish(row_ids, error)
            return
        self._account.count(streamed, 1, self._clock.monotonic() - from_s)
        handed_over_s = self._clock.now()
        self._account.span("stream_out", made_by, start_s, handed_over_s, streamed)
        self._follow(made_by, row_ids, streamed, handed_over_s)

    def _stream(self, jobs: Sequence[StreamJob], *, merged: bool) -> Streamed:
        job = jobs[-1]
        if merged and len(jobs) == 1 and isinstance(job, RowsJob):
            return stream_out_rows(
                job.pool,
                job.rows,
                self._setup,
                self._staging,
                self._sender,
                layers=job.layers,
                copier=self._copier,
                after=job.after,
                timeout_s=self._patience_s if job.made_by == "step" else self._timeout_s,
                mark=job.mark,
            )
        streamed = stream_regions(
            merged_regions(jobs, self._setup),
            self._setup,
            self._staging,
            self._sender,
            merged=merged,
            mark=job.mark if isinstance(job, RowsJob) else None,
            copier=self._copier,
            after=job.after,  # Jobs are in the order of the computation: all others' cells were made before.
            timeout_s=self._timeout_s,
        )
        self._retained.keep(jobs)
        return streamed

    def _follow(self, made_by: Pass, row_ids: tuple[RowId, ...], streamed: Streamed, handed_over_s: float) -> None:
        """The job will be finished when the last of its messages has been sent or has failed."""
        waiting = JobOutcome(len(streamed.sends))

        def one_done(sent: Future[None]) -> None:
            if waiting.count_down(sent):
                self._account.span("flush", made_by, handed_over_s, self._clock.now(), streamed)
                self._finish(row_ids, waiting.error)

        for sent in streamed.sends:
            sent.add_done_callback(one_done)
        if not streamed.sends:
            self._finish(row_ids, None)

    def _finish(self, row_ids: tuple[RowId, ...], error: Exception | None) -> None:
        if error is not None:
            logger.warning("KV of rows %s was not streamed: %s", list(row_ids), error)
            self._account.failed()
            self._on_error(error, row_ids)
        self._queue.finish()
