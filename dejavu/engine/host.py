"""What the engine has at hand in its process: who it is, whom it can tell, what it counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dejavu.clock import Clock
from dejavu.control.plan import Place, Plan
from dejavu.engine import messages as m
from dejavu.engine.compute import buffer_of
from dejavu.engine.mailbox import Mailbox
from dejavu.engine.meter import Meter
from dejavu.engine.peers import CONTROLLER, Peers
from dejavu.errors import Fatal
from dejavu.ids import WorkerName
from dejavu.kv.pool import KvPool
from dejavu.kv.route import RowSpan
from dejavu.kv.streamer import Streamer
from dejavu.models.stage import StageModel
from dejavu.report.spans import SpanRecorder
from dejavu.transport.base import Buffer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A worker's surroundings."""

    name: WorkerName
    plan: Plan
    place: Place
    loaded: StageModel | None
    """None on a stage that computes nothing."""
    pool: KvPool | None
    mailbox: Mailbox
    peers: Peers
    recorder: SpanRecorder
    meter: Meter
    clock: Clock
    is_asked_to_stop: Callable[[], bool]

    @property
    def model(self) -> StageModel:
        """The stage's model. Raises Fatal where there is none."""
        if self.loaded is None:
            raise Fatal(f"{self.place.pipeline.kind} stage {self.place.stage.index} has no model")
        return self.loaded

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

    def report(self, *, streamers: Sequence[Streamer], kv: dict[str, int]) -> None:
        """The controller gets this worker's counters and spans; ``kv`` says what became of the chunks that came."""
        counters = self.meter.counters(
            self.name,
            self.place,
            streamers=[streamer.counters for streamer in streamers],
            kv=kv,
            weight_bytes=self.loaded.weight_bytes if self.loaded is not None else 0,
            pool_bytes=self.pool.nbytes if self.pool is not None else 0,
        )
        spans = m.encode_spans(list(self.recorder.snapshot()))
        report = m.Report(epoch=self.plan.epoch, worker=self.name, counters=counters)
        self.tell(CONTROLLER, report, (memoryview(spans),))
