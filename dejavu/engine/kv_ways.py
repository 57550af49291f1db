"""The ways of KV into and out of a stage, as the plan gives them: inbox, store of copies, streamers, staging."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dejavu.control.plan import Place, Plan, Stage
from dejavu.engine.copies import Copies
from dejavu.engine.kept import HeldPool
from dejavu.engine.mailbox import Mailbox, PeerLost, RowsSpoilt
from dejavu.engine.outflow import Outflow
from dejavu.engine.peers import Peers
from dejavu.errors import ConfigError
from dejavu.ids import RowId
from dejavu.kv.device import copier_for
from dejavu.kv.disk import DiskMemory
from dejavu.kv.fan_out import FanOut
from dejavu.kv.flush import Destination, RemoteMemory, Sender
from dejavu.kv.inbox import KvInbox
from dejavu.kv.route import Holding
from dejavu.kv.staging import StagingRing
from dejavu.kv.stream_account import StreamSpan
from dejavu.kv.stream_setup import StreamSetup
from dejavu.kv.streamer import Streamer
from dejavu.report.spans import Category, SpanRecorder
from dejavu.transport.base import TransportError

logger = logging.getLogger(__name__)

_STAGING_BUFFERS = 4
_MOST_STAGING_BYTES = 8 * 2**20
"""Large enough that a message's fixed cost does not show, small enough that four of them are nothing."""
_PATIENCE_S = 0.05
"""So long a step waits for a buffer to copy its cells with: about the time of a step, and no user sees it."""
_HOLDERS = "holders"
"""All destinations of a copy together, as one owner."""
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

    def span(self, category: Category, span: StreamSpan) -> None:
        """The part of a job is on the timeline."""
        duration_s = span.end_s - span.start_s
        if span.name == "stream_wait":
            self.recorder.add(span.name, "wait", span.start_s, duration_s, of=span.made_by)
        else:
            self.recorder.add(
                span.name,
                category,
                span.start_s,
                duration_s,
                of=span.made_by,
                bytes=span.num_bytes,
                transfers=span.num_transfers,
            )

    def handoff_failed(self, error: Exception, row_ids: tuple[RowId, ...]) -> None:
        """The rows cannot go on in this epoch: their KV did not leave."""
        if isinstance(error, TransportError):
            # A lost link means a new epoch, in which they do go on; another attempt before it would fail as well.
            self.mailbox.post(PeerLost(peer=error.peer, reason=str(error), epoch=self.plan.epoch))
            return
        self.mailbox.post(RowsSpoilt(row_ids=row_ids, reason=f"KV could not be streamed: {error}"))


def kv_inbox(cluster: str, plan: Plan, place: Place) -> KvInbox:
    """Where rows land that a stage does not compute itself: prompts, and what is restored."""
    return KvInbox(
        cluster=cluster,
        epoch=plan.epoch,
        layout=plan.model.layout,
        holding=_holding(plan, place.stage),
        pin=plan.device != "cpu",
    )


def outflow(flow: Flow, held: HeldPool | None, kv_folder: Path | None) -> Outflow:
    """What leaves a stage that computes. Raises ConfigError for copies on a disk that cannot be used."""
    if flow.place.pipeline.kind == "prompt":
        targets = tuple(_holding(flow.plan, stage) for stage in flow.plan.token_pipeline.stages)
        way = _Way(targets=targets, sender=flow.peers, on_error=flow.handoff_failed, retain_bytes=_RETAINED_BYTES)
        return Outflow(handoff=_streamer(flow, way))
    disk = _disk(flow, kv_folder)
    destinations = _destinations(flow, disk)
    if held is None or not destinations:
        return Outflow()
    lost: deque[RowId] = deque()

    def failed(error: Exception, row_ids: tuple[RowId, ...]) -> None:
        logger.warning("the copies of rows %s are behind: %s", list(row_ids), error)
        lost.extend(row_ids)

    everywhere = replace(_holding(flow.plan, flow.place.stage), owner=_HOLDERS)
    category: Category = "replicate" if flow.plan.replication else "stream"
    way = _Way(
        targets=(everywhere,),
        sender=FanOut(destinations),
        on_error=failed,
        patience_s=_PATIENCE_S,
        category=category,
    )
    return Outflow(
        copies=Copies(_streamer(flow, way), held.pool, held.rows, lost, disk, copy_steps=flow.plan.copy_steps)
    )


def _destinations(flow: Flow, disk: DiskMemory | None) -> dict[str, Destination]:
    """Everybody who gets a copy of this stage's rows."""
    holders = (*flow.plan.successors_of(flow.place.stage.worker), *flow.plan.memory_stages)
    destinations: dict[str, Destination] = {
        stage.worker: RemoteMemory(owner=stage.worker, sender=flow.peers) for stage in holders
    }
    return destinations if disk is None else {**destinations, "disk": disk}


def _disk(flow: Flow, kv_folder: Path | None) -> DiskMemory | None:
    if flow.plan.stream_to != "disk":
        return None
    if kv_folder is None:
        raise ConfigError("strategy.stream_to=disk needs a folder, and this worker was started without one")
    disk = DiskMemory(kv_folder)
    logger.info("copies of rows go to %s (%s)", kv_folder, disk.regime)
    return disk


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """Where a streamer's KV goes, and what becomes of KV that does not leave."""

    targets: tuple[Holding, ...]
    sender: Sender
    on_error: Callable[[Exception, tuple[RowId, ...]], None]
    retain_bytes: int = 0
    patience_s: float | None = None
    category: Category = "stream"


def _streamer(flow: Flow, way: _Way) -> Streamer:
    plan, layout = flow.plan, flow.plan.model.layout
    setup = StreamSetup(
        cluster=flow.cluster,
        epoch=plan.epoch,
        source=_holding(plan, flow.place.stage),
        targets=way.targets,
        layout=layout,
    )
    layer_bytes = layout.position_bytes * layout.max_length * flow.place.pipeline.microbatch_rows
    least_bytes = layout.position_bytes * len(flow.place.stage.layers)
    buffer_bytes = max(min(layer_bytes, _MOST_STAGING_BYTES), least_bytes)
    # A prompt stage's cells are where they were computed, those of rows where rows lie.
    device = plan.device if flow.place.pipeline.kind == "prompt" else plan.rows_device
    return Streamer(
        setup,
        StagingRing(_STAGING_BUFFERS, buffer_bytes, pin=device != "cpu", device=device),
        way.sender,
        on_error=way.on_error,
        on_span=partial(flow.span, way.category),
        level=plan.streaming,
        copier=copier_for(device),
        retain_bytes=way.retain_bytes,
        timeout_s=plan.timeout_s,
        patience_s=way.patience_s,
    )


def _holding(plan: Plan, stage: Stage) -> Holding:
    return Holding(owner=stage.worker, layers=stage.layers, heads=(0, plan.model.num_kv_heads))
