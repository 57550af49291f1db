"""What the engine has at hand in its process: who it is, whom it can tell, what it counts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dejavu.clock import Clock
from dejavu.control.plan import Place, Plan
from dejavu.engine import messages as m
from dejavu.engine.compute import buffer_of
from dejavu.engine.kept import Kept
from dejavu.engine.mailbox import Mailbox
from dejavu.engine.meter import Meter
from dejavu.engine.outflow import Outflow
from dejavu.engine.payloads import encode_spans
from dejavu.engine.peers import CONTROLLER, Peers
from dejavu.errors import Fatal
from dejavu.ids import WorkerName
from dejavu.kv.pool import KvPool
from dejavu.kv.route import RowSpan
from dejavu.kv.swap_counters import SwapCounters
from dejavu.models.computation import StageComputation
from dejavu.report.counters import LiveFigures, RehearsalCounters, WorkerCounters
from dejavu.report.spans import SpanRecorder
from dejavu.transport.base import Buffer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A worker's surroundings in one epoch."""

    name: WorkerName
    plan: Plan
    place: Place
    kept: Kept
    mailbox: Mailbox
    peers: Peers
    clock: Clock
    reach: Callable[[WorkerName], None]
    """A link to that worker is up afterwards, whether the plan foresees one or not. Raises TransportError."""
    acknowledge: Callable[[str, int, bytes], None]
    """Pipeline, stage and value of a key of acknowledgements: it will be in the store. Never waits."""
    is_asked_to_stop: Callable[[], bool]
    is_superseded: Callable[[], bool]
    """Whether a newer plan is in force: then this epoch is over."""

    @property
    def recorder(self) -> SpanRecorder:
        """Of the whole process."""
        return self.kept.recorder

    @property
    def meter(self) -> Meter:
        """Of the whole process."""
        return self.kept.meter

    @property
    def pool(self) -> KvPool | None:
        """The stage's pool; None on a stage that keeps no rows."""
        return None if self.kept.held is None else self.kept.held.pool

    @property
    def model(self) -> StageComputation:
        """The stage's model. Raises Fatal where there is none."""
        if self.kept.model is None:
            raise Fatal(f"{self.place.pipeline.kind} stage {self.place.stage.index} has no model")
        return self.kept.model

    @property
    def first_worker(self) -> WorkerName:
        """Stage 0 of this worker's pipeline."""
        return self.place.pipeline.stages[0].worker

    def tell(self, peer: str, message: m.AnyMessage, payload: Sequence[Buffer] = ()) -> None:
        """The message is queued; a failure arrives later as ``PeerLost``."""
        self.peers.tell(peer, message, payload)

    def spans_of(self, rows: Sequence[m.PromptRow]) -> tuple[RowSpan, ...]:
        """The rows as DejaVuLib names them."""
        return tuple(RowSpan(row_id=row.row_id, length=row.length) for row in rows)

    def inspect(self, message: m.InspectRow) -> Buffer:
        """The cells [0, length) of one place: [layer][K, V][head][position][dim]."""
        if self.pool is None:
            return memoryview(b"")
        row = message.microbatch * self.place.pipeline.microbatch_rows + message.row_index
        cells = [
            buffer[row, :, : message.length]
            for layer in self.place.stage.layers.indices
            for buffer in (self.pool.keys(layer), self.pool.values(layer))
        ]
        return buffer_of(torch.stack(cells))

    def report(self, out: Outflow | None, kv: dict[str, int], swap: SwapCounters | None = None) -> None:
        """The controller gets this worker's counters and spans; ``kv`` says what became of this epoch's chunks, and
        ``swap`` what was swapped in it."""
        counters = self._counters(out, kv, swap)
        spans = encode_spans(list(self.recorder.snapshot()))
        report = m.Report(epoch=self.plan.epoch, worker=self.name, counters=counters)
        self.tell(CONTROLLER, report, (memoryview(spans),))

    def tell_meters(self, out: Outflow | None, kv: dict[str, int], swap: SwapCounters | None = None) -> None:
        """The controller gets this worker's figures of the moment; see ``report``."""
        figures = LiveFigures(
            incarnation=self.peers.hello.incarnation,
            at_s=self.clock.monotonic(),
            counters=self._counters(out, kv, swap),
            sent_bytes=self.peers.sent_bytes,
            rows={} if self.kept.held is None else self.kept.held.rows.by_microbatch(),
            kv_used_bytes=self.kept.kv_used_bytes,
            kv_room_bytes=self.kept.kv_room_bytes,
        )
        self.tell(CONTROLLER, m.Meters(epoch=self.plan.epoch, worker=self.name, figures=figures))

    def _counters(self, out: Outflow | None, kv: dict[str, int], swap: SwapCounters | None) -> WorkerCounters:
        totals, model = self.kept.totals, self.kept.model
        return self.meter.counters(
            self.name,
            self.place,
            handoffs=[*totals.handoffs, *(one.counters for one in (out.handoffs if out else ()))],
            copiers=[*totals.copiers, *(one.counters for one in (out.copiers if out else ()))],
            are_replicas=self.plan.replication > 0,
            kv=dict(totals.kv + Counter(kv)),
            weight_bytes=model.weight_bytes if model is not None else 0,
            pool_bytes=self.pool.nbytes if self.pool is not None else 0,
            swap=totals.swap if swap is None else totals.swap + swap,
            rehearsal=self._rehearsal,
        )

    @property
    def _rehearsal(self) -> RehearsalCounters | None:
        times, pace = self.plan.model.modelled, self.kept.pace
        if times is None or self.kept.model is None:
            return None
        return RehearsalCounters(
            time_scale=times.time_scale,
            kv_scale=times.kv_scale,
            passes=pace.num_passes,
            planned_s=pace.planned_s,
            late_s=pace.late_s,
            most_late_s=pace.most_late_s,
        )
