"""A worker's main thread: takes events, computes what is due, passes it on. Nothing here waits for etcd.

Events are taken before work, so that a stage always decides with everything it could know. Work that arrived is
done in order; token stage 0 starts a step of its own only when nothing that arrived is waiting (prompts first).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import assert_never

from torch import Tensor

from dejavu.control.ring import Ring, StepRow
from dejavu.engine import messages as m
from dejavu.engine.compute import StageCompute, buffer_of, prompt_ids, tensor_of
from dejavu.engine.fetching import FetchAgain
from dejavu.engine.host import Host
from dejavu.engine.landed import LandedRows
from dejavu.engine.lost import LostLinks
from dejavu.engine.mailbox import ChunksSpoilt, Event, PeerLost, Received, RowsLanded, RowsSpoilt, Wake
from dejavu.engine.outflow import Outflow
from dejavu.engine.peers import CONTROLLER
from dejavu.errors import Fatal, Retryable
from dejavu.ids import Epoch, RowId
from dejavu.transport.base import Buffer

logger = logging.getLogger(__name__)

_IDLE_S = 0.5
_DRAIN_S = 2.0
"""So long a report waits for what is still on its way, so that it counts all of a run that has ended."""
_WORK = (m.RunPrompt, m.PromptActivations, m.StepActivations)


class Engine:
    """One stage at work, from its first message to ``Stop``.

    Args:
        host: name, place, plan, links and meters of this worker.
        compute: the stage's model and pool.
        ring: token stage 0's state; None elsewhere.
        landed: rows that arrive by stream; None where prompts run in this pipeline.
        out: takes the KV that leaves this stage.
    """

    def __init__(
        self,
        host: Host,
        compute: StageCompute,
        *,
        ring: Ring | None,
        landed: LandedRows | None,
        out: Outflow,
    ) -> None:
        self._host = host
        self._compute = compute
        self._ring = ring
        self._landed = landed
        self._out = out
        self._fetching = FetchAgain(host.peers, host.plan.epoch)
        self._work: deque[Received] = deque()
        self._is_stopped = False
        self._checked_s = 0.0
        self._lost = LostLinks(host.clock)

    def run(self) -> None:
        """The controller has said ``Stop``. Raises Fatal when the controller is gone, or a peer's link stays gone."""
        while not self._is_stopped:
            event = self._host.mailbox.take(0.0)
            if event is None:
                # Also while there is work: other rows' steps must not keep a row that lost its KV waiting for ever.
                self._check()
            if event is None and not self._work_once():
                with self._host.meter.waiting():
                    event = self._host.mailbox.take(_IDLE_S)
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
                self._take_landed(event.row_ids)
            case RowsSpoilt():
                self._spoilt(event.row_ids, event.reason)
            case ChunksSpoilt():
                self._fetch_again(event)
            case PeerLost():
                self._lost.note(event)
            case Wake():
                self._is_stopped = self._host.is_asked_to_stop()
            case _:
                assert_never(event)

    def _obey(self, message: m.AnyMessage) -> None:
        match message:
            case m.ExpectRows():
                self._out.begin(message.rows)
                self._take_landed(self._rows().expect(message.rows))
            case m.AdmitRows():
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
                self._host.report(streamers=self._out.streamers, kv=self._kv_counts())
            case m.SendAgain():
                self._send_again(message.parts)
            case m.SetStreaming():
                self._out.set_level(message.level)
            case m.Stop():
                logger.info("stopping: %s", message.reason)
                self._is_stopped = True
            case _:
                raise Fatal(f"{type(message).__name__} is not for a worker")

    def _work_once(self) -> bool:
        """One piece of work is done; False when there is none."""
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
            self._step(message.microbatch, message.step, message.rows, self._hidden(payload, 1))
            return
        assert isinstance(message, m.RunPrompt | m.PromptActivations)
        try:
            self._prompt(message, payload)
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

    def _prompt(self, message: m.RunPrompt | m.PromptActivations, payload: Buffer) -> None:
        rows = message.rows
        if isinstance(message, m.RunPrompt):
            inputs = prompt_ids(payload, len(rows), self._host.model.device)
        else:
            inputs = self._hidden(payload, max(row.length for row in rows), len(rows))
        self._out.begin(rows)
        with self._host.meter.computing("prompt", rows=len(rows), tokens=sum(row.length for row in rows)):
            output = self._compute.prompt(rows, inputs, self._out.on_layer(rows), self._out.on_written(rows))
            tokens = self._compute.sample_prompt(rows, output) if self._host.place.is_last else ()
        if self._host.place.is_last:
            row_ids = tuple(row.row_id for row in rows)
            self._host.tell(CONTROLLER, m.PromptTokens(epoch=self._epoch, row_ids=row_ids, tokens=tokens))
        else:
            self._pass_on(m.PromptActivations(epoch=self._epoch, rows=rows), output)
        self._out.end_pass()

    def _step(self, microbatch: int, step: int, rows: tuple[StepRow, ...], inputs: Tensor | None) -> None:
        with self._host.meter.computing("step", microbatch=microbatch, step=step, rows=len(rows)):
            output = self._compute.step(microbatch, rows, inputs)
            tokens = self._compute.sample_step(rows, output) if self._host.place.is_last else ()
        self._out.step(microbatch, rows)
        if not self._host.place.is_last:
            self._pass_on(m.StepActivations(epoch=self._epoch, microbatch=microbatch, step=step, rows=rows), output)
            return
        done = m.StepTokens(
            epoch=self._epoch,
            microbatch=microbatch,
            step=step,
            row_ids=tuple(row.row_id for row in rows),
            tokens=tokens,
        )
        self._host.tell(CONTROLLER, done)
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
        if self._landed is not None:
            self._landed.release(row_ids)
        self._out.release(row_ids)
        self._fetching.forget(row_ids)
        if self._ring is not None:
            gone = self._ring.release(row_ids)
            if gone:
                self._host.tell(CONTROLLER, m.RowsEnded(epoch=self._epoch, row_ids=gone))

    def _take_landed(self, row_ids: tuple[RowId, ...]) -> None:
        ready = self._rows().take(row_ids) if row_ids else ()
        if not ready:
            return
        self._out.prompts(ready)
        if self._ring is not None:
            for row_id in ready:
                self._ring.row_ready(row_id, self._stage)
        else:
            self._host.tell(self._host.first_worker, m.RowReady(epoch=self._epoch, row_ids=ready, stage=self._stage))

    def _spoilt(self, row_ids: tuple[RowId, ...], reason: str) -> None:
        row_ids = row_ids if self._landed is None else self._landed.unproven(row_ids)
        if row_ids:
            self._host.tell(CONTROLLER, m.RowsFailed(epoch=self._epoch, row_ids=row_ids, reason=reason))

    def _fetch_again(self, event: ChunksSpoilt) -> None:
        unproven = set(self._rows().unproven([chunk.row_id for chunk in event.chunks]))
        spent = self._fetching.ask(event.peer, [chunk for chunk in event.chunks if chunk.row_id in unproven])
        self._spoilt(spent, f"corrupt KV from {event.peer}, also when it was sent again")

    def _send_again(self, parts: Sequence[m.KvPart]) -> None:
        gone = self._out.send_again(parts)
        self._spoilt(gone, "its KV was asked for again and is not kept any more")

    def _check(self) -> None:
        now_s = self._host.clock.monotonic()
        if now_s - self._checked_s < _IDLE_S:
            return
        self._checked_s = now_s
        self._lost.check()
        if self._ring is not None:
            self._check_overdue(self._ring, now_s)

    def _check_overdue(self, ring: Ring, now_s: float) -> None:
        overdue = ring.overdue(now_s - self._host.plan.timeout_s)
        if overdue:
            reason = f"KV was not complete {self._host.plan.timeout_s:g} s after the first token"
            ring.release(overdue)
            self._host.tell(CONTROLLER, m.RowsFailed(epoch=self._epoch, row_ids=overdue, reason=reason))

    def _pass_on(self, message: m.PromptActivations | m.StepActivations, hidden: Tensor) -> None:
        assert self._host.place.next_worker is not None
        self._host.tell(self._host.place.next_worker, message, (buffer_of(hidden),))

    def _hidden(self, payload: Buffer, length: int, num_rows: int = -1) -> Tensor:
        shape = (num_rows, length, self._host.model.hidden_size)
        return tensor_of(payload, shape, self._host.model.dtype, self._host.model.device)

    def _lead(self) -> Ring:
        if self._ring is None:
            raise Fatal(f"stage {self._stage} was told what only stage 0 keeps")
        return self._ring

    def _rows(self) -> LandedRows:
        if self._landed is None:
            raise Fatal(f"{self._host.place.pipeline.kind} stage {self._stage} takes no KV")
        return self._landed

    def _kv_counts(self) -> dict[str, int]:
        counts = self._landed.counts() if self._landed is not None else {}
        return counts | {"asked_again": self._fetching.num_asked}

    @property
    def _epoch(self) -> Epoch:
        return self._host.plan.epoch

    @property
    def _stage(self) -> int:
        return self._host.place.stage.index
