"""The ways of KV into and out of a stage, as the plan gives them: inbox, store of copies, streamers, staging."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from dejavu.control.plan import Place, Plan, Stage
from dejavu.engine.copies import Copies
from dejavu.engine.mailbox import Mailbox, RowsSpoilt
from dejavu.engine.outflow import Outflow
from dejavu.engine.peers import Peers
from dejavu.errors import ConfigError
from dejavu.ids import RowId
from dejavu.kv.device import copier_for
from dejavu.kv.disk import DiskMemory
from dejavu.kv.flush import Destinations, Sender
from dejavu.kv.inbox import KvInbox
from dejavu.kv.pool import KvPool
from dejavu.kv.replica import ReplicaLimits, ReplicaStore
from dejavu.kv.route import Holding
from dejavu.kv.staging import StagingRing
from dejavu.kv.stream_account import StreamSpan
from dejavu.kv.stream_setup import StreamSetup
from dejavu.kv.streamer import Streamer
from dejavu.report.spans import SpanRecorder

logger = logging.getLogger(__name__)

_STAGING_BUFFERS = 4
_MOST_STAGING_BYTES = 8 * 2**20
"""Large enough that a message's fixed cost does not show, small enough that four of them are nothing."""
_RETAINED_BYTES = 128 * 2**20
"""Of prompt layers that have left, for token stages that ask again; older rows are computed again."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What every way out of a stage needs to know."""

    cluster: str
    plan: Plan
    place: Place
    peers: Peers
    mailbox: Mailbox
    recorder: SpanRecorder

    def span(self, span: StreamSpan) -> None:
        """The part of a job is on the timeline."""
        duration_s = span.end_s - span.start_s
        if span.name == "stream_wait":
            self.recorder.add(span.name, "wait", span.start_s, duration_s, of=span.made_by)
        else:
            self.recorder.add(
                span.name,
                "stream",
                span.start_s,
                duration_s,
                of=span.made_by,
                bytes=span.num_bytes,
                transfers=span.num_transfers,
            )

    def handoff_failed(self, error: Exception, row_ids: tuple[RowId, ...]) -> None:
        """The rows cannot go on: their KV did not leave."""
        self.mailbox.post(RowsSpoilt(row_ids=row_ids, reason=f"KV could not be streamed: {error}"))

    def copy_failed(self, error: Exception, row_ids: tuple[RowId, ...]) -> None:
        """The rows go on without a whole copy."""
        logger.error("the copies of rows %s stay incomplete: %s", list(row_ids), error)


def kv_inbox(cluster: str, plan: Plan, place: Place) -> KvInbox:
    """Where a token stage's prompts land."""
    return KvInbox(
        cluster=cluster,
        epoch=plan.epoch,
        layout=plan.model.layout,
        holding=_holding(plan, place.stage),
        pin=plan.device != "cpu",
    )


def replica_store(cluster: str, plan: Plan, place: Place) -> ReplicaStore:
    """Where a memory stage's copies land: as many whole rows as the token stages hold, and as many that have ended."""
    layout = plan.model.layout
    row_bytes = layout.row_bytes(len(place.stage.layers))
    return ReplicaStore(
        cluster=cluster,
        epoch=plan.epoch,
        layout=layout,
        holding=_holding(plan, place.stage),
        limits=ReplicaLimits(max_bytes=2 * place.pipeline.num_rows * row_bytes),
    )


def outflow(flow: Flow, pool: KvPool | None, kv_folder: Path | None) -> Outflow:
    """What leaves a stage that computes. Raises ConfigError for copies on a disk that cannot be used."""
    if flow.place.pipeline.kind == "prompt":
        targets = tuple(_holding(flow.plan, stage) for stage in flow.plan.token_pipeline.stages)
        return Outflow(handoff=_streamer(flow, targets, flow.peers, retain_bytes=_RETAINED_BYTES))
    if flow.plan.stream_to is None or pool is None:
        return Outflow()
    rows = flow.place.pipeline.microbatch_rows
    if flow.plan.stream_to == "memory":
        targets = tuple(_holding(flow.plan, stage) for stage in flow.plan.memory_stages)
        return Outflow(copies=Copies(_streamer(flow, targets, flow.peers), pool, rows, None))
    if kv_folder is None:
        raise ConfigError("strategy.stream_to=disk needs a folder, and this worker was started without one")
    disk = DiskMemory(kv_folder)
    logger.info("copies of rows go to %s (%s)", kv_folder, disk.regime)
    target = _holding(flow.plan, flow.place.stage)
    streamer = _streamer(flow, (target,), Destinations(by_owner={target.owner: disk}))
    return Outflow(copies=Copies(streamer, pool, rows, disk))


def _streamer(flow: Flow, targets: tuple[Holding, ...], sender: Sender, *, retain_bytes: int = 0) -> Streamer:
    plan, layout = flow.plan, flow.plan.model.layout
    is_handoff = flow.place.pipeline.kind == "prompt"
    setup = StreamSetup(
        cluster=flow.cluster,
        epoch=plan.epoch,
        source=_holding(plan, flow.place.stage),
        targets=targets,
        layout=layout,
    )
    layer_bytes = layout.position_bytes * layout.max_length * flow.place.pipeline.microbatch_rows
    least_bytes = layout.position_bytes * len(flow.place.stage.layers)
    buffer_bytes = max(min(layer_bytes, _MOST_STAGING_BYTES), least_bytes)
    return Streamer(
        setup,
        StagingRing(_STAGING_BUFFERS, buffer_bytes, pin=plan.device != "cpu", device=plan.device),
        sender,
        on_error=flow.handoff_failed if is_handoff else flow.copy_failed,
        on_span=flow.span,
        level=plan.streaming,
        copier=copier_for(plan.device),
        retain_bytes=retain_bytes,
        timeout_s=plan.timeout_s,
    )


def _holding(plan: Plan, stage: Stage) -> Holding:
    return Holding(owner=stage.worker, layers=stage.layers, heads=(0, plan.model.num_kv_heads))
