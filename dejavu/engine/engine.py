"""A worker's main thread: takes events, computes what is due, passes it on. Nothing here waits for etcd.

Events are taken before work, so that a stage always decides with everything it could know. Work that arrived is
done in order; token stage 0 starts a step of its own only when nothing that arrived is waiting (prompts first).
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import assert_never

from dejavu.control.ring import Ring, StepRow
from dejavu.engine import messages as m
from dejavu.engine.acknowledgements import Acknowledgements
from dejavu.engine.arrivals import Arrivals
from dejavu.engine.host import Host
from dejavu.engine.landed import LandedRows
from dejavu.engine.lost import LostLinks
from dejavu.engine.mailbox import (
    ChunksSpoilt,
    ClusterFenced,
    ClusterFormed,
    Event,
    PeerLost,
    Received,
    RowsLanded,
    RowsSpoilt,
    Wake,
)
from dejavu.engine.outflow import Outflow
from dejavu.engine.passes import Passes
from dejavu.engine.peers import CONTROLLER
from dejavu.engine.pool_rows import PoolRows
from dejavu.engine.sources import Sources
from dejavu.engine.spoilt import SpoiltKv
from dejavu.engine.step_memory import StepMemory
from dejavu.errors import Fatal, Retryable
from dejavu.ids import Epoch, RowId
from dejavu.kv.swap_counters import SwapCounters
from dejavu.transport.base import Buffer

logger = logging.getLogger(__name__)

_IDLE_S = 0.5
_DRAIN_S = 2.0
"""So long a report waits for what is still on its way, so that it counts all of a run that has ended."""
_WORK = (m.RunPrompt, m.PromptActivations, m.StepActivations)
_READING = (m.InspectRow, m.AskReport, m.SendAgain, m.AskHoldings, m.SendRows)
"""Whoever sends these is told of cells of rows, which must lie in their places then."""


class Engine:
    """One stage at work in one epoch, from its first message to ``Stop`` or a newer plan.

    Args:
        host: name, place, plan, links and meters of this worker.
        passes: computes prompts and steps.
        rows: what lies in the stage's pool; None where there is none.
        ring: token stage 0's state; None elsewhere.
        landed: rows that arrive by stream; None where none can.
        memory: where steps have their KV; None where there are none.
        out: takes the KV that leaves this stage.
        sources: what this worker holds for others.
    """

    def __init__(
        self,
        host: Host,
        passes: Passes,
        *,
        rows: PoolRows | None,
        ring: Ring | None,
        landed: LandedRows | None,
        memory: StepMemory | None,
        out: Outflow,
        sources: Sources,
    ) -> None:
        self._host = host
        self._passes = passes
        self._ring = ring
        self._out = out
        self._sources = sources
        self._memory = memory
        self._arrivals = Arrivals(host, rows=rows, ring=ring, landed=landed, memory=memory, out=out)
        self._spoilt = SpoiltKv(host, landed, out)
        self._acks = Acknowledgements(host)
        self._work: deque[Received] = deque()
        self._is_stopped = False
        self._checked_s = 0.0
        self._lost = LostLinks(host)

    def run(self) -> None:
        """The controller has said ``Stop``, or a newer plan is in force. Raises Fatal when the controller is gone."""
        try:
            self._run()
        finally:
            for work in self._work:
                work.inbound.release()

    def finish(self) -> dict[str, int]:
        """Rows that had landed whole are in the pool. Returns what became of the chunks that came for it.

        Once nothing lands any more.
        """
        self._arrivals.finish()
        return self._own_counts()

    def _run(self) -> None:
        while not self._is_stopped:
            event = self._host.mailbox.take(0.0)
            if event is None:
                # Also while there is work: other rows' steps must not keep a row that lost its KV waiting for ever.
                self._check()
            if event is None and not self._work_once():
                with self._host.meter.waiting():
                    event = self._host.mailbox.take(_IDLE_S)
                self._host.kept.pace.idle()
            if event is not None:
                self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case Received():
                if isinstance(event.message, _WORK):
                    self._work.append(event)
                else:
                    self._obey(event.message)
                    event.inbound.release()
            case RowsLanded():
                self._arrivals.landed(event.row_ids)
            case RowsSpoilt():
                self._spoilt.rows(event.row_ids, event.reason)
            case ChunksSpoilt():
                self._spoilt.chunks(event)
            case PeerLost():
                self._lost.note(event)
            case Wake():
                self._is_stopped = self._host.is_asked_to_stop() or self._host.is_superseded()
            case ClusterFenced() | ClusterFormed():
                raise Fatal(f"{type(event).__name__} is for the controller")
            case _:
                assert_never(event)

    def _obey(self, message: m.AnyMessage) -> None:
        if self._memory is not None and isinstance(message, _READING):
            self._memory.drain()
        match message:
            case m.ExpectRows():
                self._arrivals.expect(message.rows)
            case m.AdmitRows():
                self._lead().resume_at(message.steps)
                self._lead().admit(message.rows, self._host.clock.monotonic())
            case m.RowReady():
                for row_id in message.row_ids:
                    self._lead().row_ready(row_id, message.stage)
            case m.StepTokens():
                self._complete(message)
            case m.ReleaseRows():
                self._release(message.row_ids)
            case m.InspectRow():
                self._host.tell(
                    CONTROLLER, m.InspectedRow(epoch=self._epoch, stage=self._stage), (self._host.inspect(message),)
                )
            case m.AskReport():
                self._out.drain(_DRAIN_S)
                self._host.report(self._out, self._kv_counts(), self._swap_counts())
            case m.AskMeters():
                self._host.tell_meters(self._out, self._kv_counts(), self._swap_counts())
            case m.SendAgain():
                self._spoilt.asked_again(message.parts)
            case m.AskHoldings():
                self._sources.tell()
            case m.SendRows():
                self._sources.send(message.parts)
            case m.RestoreRows():
                self._arrivals.restore(message)
            case m.ForgetSources():
                self._host.kept.forget_sources()
            case m.SetStreaming():
                self._out.set_level(message.level)
            case m.Stop():
                logger.info("stopping: %s", message.reason)
                self._is_stopped = True
            case _:
                raise Fatal(f"{type(message).__name__} is not for a worker")

    def _work_once(self) -> bool:
        """One piece of work is done; False when there is none."""
        if self._host.kept.slow_s:
            self._host.clock.sleep(self._host.kept.slow_s)
            self._host.kept.pace.idle()
        if self._work:
            work = self._work.popleft()
            try:
                self._do(work)
            finally:
                work.inbound.release()
            return True
        step = self._ring.next_step() if self._ring is not None else None
        if step is None:
            return False
        self._step(step.microbatch, step.step, step.rows, None)
        return True

    def _do(self, work: Received) -> None:
        message, payload = work.message, work.inbound.payload
        if isinstance(message, m.StepActivations):
            self._step(message.microbatch, message.step, message.rows, payload)
            return
        assert isinstance(message, m.RunPrompt | m.PromptActivations)
        try:
            self._passes.prompt(message, payload)
        except (RuntimeError, ValueError, IndexError, Retryable) as error:
            # A prompt that cannot be computed (memory, a bad id) or streamed costs its own rows, not the stage.
            logger.exception("prompt microbatch failed")
            self._out.abandon_pass()
            row_ids = tuple(row.row_id for row in message.rows)
            self._host.tell(
                CONTROLLER,
                m.RowsFailed(
                    epoch=self._epoch, row_ids=row_ids, reason=f"the prompt failed: {error}", while_prompt=True
                ),
            )

    def _step(self, microbatch: int, step: int, rows: tuple[StepRow, ...], payload: Buffer | None) -> None:
        done = self._passes.step(microbatch, step, rows, payload)
        if done is None:
            return
        if self._ring is not None:
            self._complete(done)
        else:
            self._host.tell(self._host.first_worker, done)

    def _complete(self, message: m.StepTokens) -> None:
        tokens = dict(zip(message.row_ids, message.tokens, strict=True))
        ended = self._lead().complete(message.microbatch, message.step, tokens)
        if ended:
            self._host.tell(CONTROLLER, m.RowsEnded(epoch=self._epoch, row_ids=ended))

    def _release(self, row_ids: tuple[RowId, ...]) -> None:
        self._arrivals.release(row_ids)
        self._out.release(row_ids)
        self._host.kept.replicas.release(row_ids)
        self._spoilt.forget(row_ids)
        if self._ring is not None:
            gone = self._ring.release(row_ids)
            if gone:
                self._host.tell(CONTROLLER, m.RowsEnded(epoch=self._epoch, row_ids=gone))

    def _check(self) -> None:
        now_s = self._host.clock.monotonic()
        if now_s - self._checked_s < _IDLE_S:
            return
        self._checked_s = now_s
        self._acks.publish()
        self._lost.check()
        if self._ring is not None:
            self._check_overdue(self._ring, now_s)

    def _check_overdue(self, ring: Ring, now_s: float) -> None:
        overdue = ring.overdue(now_s - self._host.plan.timeout_s)
        if overdue:
            reason = f"KV was not complete {self._host.plan.timeout_s:g} s after the first token"
            ring.release(overdue)
            self._host.tell(CONTROLLER, m.RowsFailed(epoch=self._epoch, row_ids=overdue, reason=reason))

    def _lead(self) -> Ring:
        if self._ring is None:
            raise Fatal(f"stage {self._stage} was told what only stage 0 keeps")
        return self._ring

    def _kv_counts(self) -> dict[str, int]:
        totals = Counter(self._own_counts())
        totals.update(self._host.kept.replicas.counts())
        return dict(totals)

    def _swap_counts(self) -> SwapCounters:
        return SwapCounters() if self._memory is None else self._memory.counters

    def _own_counts(self) -> dict[str, int]:
        return self._arrivals.counts() | {"asked_again": self._spoilt.num_asked}

    @property
    def _epoch(self) -> Epoch:
        return self._host.plan.epoch

    @property
    def _stage(self) -> int:
        return self._host.place.stage.index
