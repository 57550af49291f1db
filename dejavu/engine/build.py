"""Builds a stage as the plan gives it: model, pool, inbox, streamer, ring. The slow part of a worker's start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dejavu.clock import Clock
from dejavu.control.plan import Place, Plan, Stage
from dejavu.control.ring import Ring
from dejavu.engine.compute import StageCompute
from dejavu.engine.engine import Engine
from dejavu.engine.heap import keep_freed_memory
from dejavu.engine.host import Host
from dejavu.engine.landed import LandedRows
from dejavu.engine.landing import Landing
from dejavu.engine.mailbox import Mailbox, RowsSpoilt
from dejavu.engine.meter import Meter
from dejavu.engine.peers import Peers
from dejavu.errors import ConfigError
from dejavu.ids import WorkerName
from dejavu.kv.device import copier_for
from dejavu.kv.inbox import KvInbox
from dejavu.kv.pool import KvPool
from dejavu.kv.route import Holding
from dejavu.kv.staging import StagingRing
from dejavu.kv.stream import StreamSetup
from dejavu.kv.streamer import Streamer
from dejavu.models.spec import describe
from dejavu.models.stage import StageModel
from dejavu.report.spans import SpanRecorder

logger = logging.getLogger(__name__)

_STAGING_BUFFERS = 4
_MOST_STAGING_BYTES = 8 * 2**20
"""Large enough that a message's fixed cost does not show, small enough that four of them are nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStage:
    """A stage that can run once its links are up; ``close`` in this order."""

    engine: Engine
    streamer: Streamer | None
    landing: Landing

    def close(self) -> None:
        """The stage's threads have ended."""
        if self.streamer is not None:
            self.streamer.close()
        self.landing.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStage:
    """The heavy parts: the model's weights and the KV pool."""

    model: StageModel
    pool: KvPool | None


def load_stage(plan: Plan, place: Place, recorder: SpanRecorder) -> LoadedStage:
    """The stage's own tensors and its pool are in memory. Raises ConfigError for weights that do not fit the plan."""
    torch.set_num_threads(plan.threads_per_worker)
    _check_model(plan)
    keep_freed_memory()
    layers = place.stage.layers
    with recorder.span("load", "load", first_layer=layers.start, stop_layer=layers.stop):
        model = StageModel.load(plan.model, layers, plan.device)
        pool = None
        if place.pipeline.kind != "prompt":
            pool = KvPool(plan.model.layout, layers, place.pipeline.num_rows, plan.device)
    logger.info(
        "layers [%d, %d) loaded: %.1f MiB of weights, %.1f MiB of KV pool",
        layers.start,
        layers.stop,
        model.weight_bytes / 2**20,
        (pool.nbytes if pool is not None else 0) / 2**20,
    )
    return LoadedStage(model=model, pool=pool)


def build_stage(
    *,
    name: WorkerName,
    cluster: str,
    plan: Plan,
    place: Place,
    loaded: LoadedStage,
    mailbox: Mailbox,
    peers: Peers,
    recorder: SpanRecorder,
    clock: Clock,
    is_asked_to_stop: Callable[[], bool],
) -> BuiltStage:
    """The stage's threads run and wait for their first message."""
    host = Host(
        name=name,
        plan=plan,
        place=place,
        model=loaded.model,
        pool=loaded.pool,
        mailbox=mailbox,
        peers=peers,
        recorder=recorder,
        meter=Meter(recorder),
        clock=clock,
        is_asked_to_stop=is_asked_to_stop,
    )
    kind = place.pipeline.kind
    inbox = _inbox(cluster, plan, place) if kind == "token" else None
    landed = None
    if inbox is not None and loaded.pool is not None:
        landed = LandedRows(inbox, loaded.pool, place.pipeline.microbatch_rows, recorder)
    streamer = _streamer(cluster, plan, place, peers, mailbox, recorder) if kind == "prompt" else None
    engine = Engine(
        host,
        StageCompute(loaded.model, place, pool=loaded.pool),
        ring=_ring(place) if kind != "prompt" and place.is_first else None,
        landed=landed,
        streamer=streamer,
    )
    return BuiltStage(engine=engine, streamer=streamer, landing=Landing(mailbox, inbox))


def _check_model(plan: Plan) -> None:
    """This machine's copy of the model is the plan's. Raises ConfigError with both hashes."""
    here = describe(Path(plan.model.folder), plan.model.dtype, plan.model.max_length)
    if here.model_hash != plan.model.model_hash:
        raise ConfigError(
            f"the model in {plan.model.folder} is not the plan's: "
            f"its hash is {here.model_hash} here and {plan.model.model_hash} in the plan"
        )


def _ring(place: Place) -> Ring:
    stages = place.pipeline.depth if place.pipeline.kind == "token" else 0
    return Ring(num_microbatches=place.pipeline.in_flight, num_ready_stages=stages)


def _inbox(cluster: str, plan: Plan, place: Place) -> KvInbox:
    return KvInbox(
        cluster=cluster,
        epoch=plan.epoch,
        layout=plan.model.layout,
        holding=_holding(plan, place.stage),
        pin=plan.device != "cpu",
    )


def _streamer(
    cluster: str, plan: Plan, place: Place, peers: Peers, mailbox: Mailbox, recorder: SpanRecorder
) -> Streamer:
    layout = plan.model.layout
    setup = StreamSetup(
        cluster=cluster,
        epoch=plan.epoch,
        source=_holding(plan, place.stage),
        targets=tuple(_holding(plan, stage) for stage in plan.token_pipeline.stages),
        layout=layout,
    )
    layer_bytes = layout.position_bytes * layout.max_length * place.pipeline.microbatch_rows
    buffer_bytes = max(min(layer_bytes, _MOST_STAGING_BYTES), layout.position_bytes)
    staging = StagingRing(_STAGING_BUFFERS, buffer_bytes, pin=plan.device != "cpu", device=plan.device)
    return Streamer(
        setup,
        staging,
        peers,
        on_error=lambda error, row_ids: mailbox.post(
            RowsSpoilt(row_ids=row_ids, reason=f"KV could not be streamed: {error}")
        ),
        on_span=lambda span, start_s, end_s, num_bytes: recorder.add(
            span, "stream", start_s, end_s - start_s, bytes=num_bytes
        ),
        copier=copier_for(plan.device),
        timeout_s=plan.timeout_s,
    )


def _holding(plan: Plan, stage: Stage) -> Holding:
    return Holding(owner=stage.worker, layers=stage.layers, heads=(0, plan.model.num_kv_heads))
