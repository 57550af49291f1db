"""Builds a stage as the plan gives it: model, pool, inbox, streamer, ring. The slow part of a worker's start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dejavu.clock import Clock
from dejavu.control.plan import Place, Plan
from dejavu.control.ring import Ring
from dejavu.engine.compute import StageCompute
from dejavu.engine.engine import Engine
from dejavu.engine.heap import keep_freed_memory
from dejavu.engine.host import Host
from dejavu.engine.kept import HeldPool, Kept
from dejavu.engine.kv_ways import Flow, kv_inbox, outflow
from dejavu.engine.landed import LandedRows
from dejavu.engine.landing import Landing
from dejavu.engine.mailbox import Mailbox
from dejavu.engine.memory_stage import MemoryEngine
from dejavu.engine.meter import Meter
from dejavu.engine.outflow import Outflow
from dejavu.engine.passes import Passes
from dejavu.engine.peers import Peers
from dejavu.engine.pool_rows import PoolRows
from dejavu.engine.sources import Sources
from dejavu.engine.step_memory import StepMemory
from dejavu.engine.swapping import swapped_or_resident
from dejavu.errors import ConfigError
from dejavu.ids import FIRST_EPOCH, WorkerName
from dejavu.kv.fresh_memory import fresh_zeros
from dejavu.kv.inbox import KvInbox
from dejavu.kv.layout import LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.slots import NUM_SLOTS
from dejavu.kv.swap_counters import SwapCounters
from dejavu.models.computation import StageComputation
from dejavu.models.modelled_stage import ModelledStage
from dejavu.models.pace import Pace
from dejavu.models.spec import describe
from dejavu.models.stage import StageModel
from dejavu.report.spans import SpanRecorder

logger = logging.getLogger(__name__)


class StageEngine(Protocol):
    """What the main thread runs."""

    def run(self) -> None:
        """The controller has said ``Stop``, or a newer plan is in force. Raises Fatal when the stage cannot go on."""

    def finish(self) -> dict[str, int]:
        """Nothing of this epoch is left half done. Returns counts of this epoch's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStage:
    """A stage that can run, in one epoch, once its links are up."""

    engine: StageEngine
    kept: Kept
    out: Outflow
    landing: Landing
    memory: StepMemory | None = None

    def close(self) -> None:
        """The stage's threads have ended, and what outlives the epoch is with ``kept``. Its links are down already."""
        if self.memory is not None:
            # First of all: what others read of rows, they read in the rows' places.
            self.memory.close()
        self.out.close()
        self.landing.close()
        own = self.engine.finish()
        handoffs, copiers = self.out.handoffs, self.out.copiers
        swap = SwapCounters() if self.memory is None else self.memory.counters
        self.kept.totals.end_epoch([one.counters for one in handoffs], [one.counters for one in copiers], own, swap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a stage needs of its process."""

    name: WorkerName
    cluster: str
    mailbox: Mailbox
    peers: Peers
    clock: Clock
    reach: Callable[[WorkerName], None]
    acknowledge: Callable[[str, int, bytes], None]
    is_asked_to_stop: Callable[[], bool]
    is_superseded: Callable[[], bool]
    kv_folder: Path | None = None
    """For copies on disk."""


def new_kept(clock: Clock) -> Kept:
    """Nothing is loaded yet."""
    recorder = SpanRecorder(clock)
    return Kept(recorder=recorder, meter=Meter(recorder), pace=Pace(clock))


def load_whole(plan: Plan, kept: Kept) -> None:
    """The whole model is in memory, for any stage, and room for its pool.

    Raises ConfigError for weights that do not fit the plan.
    """
    if kept.whole is not None:
        return
    torch.set_num_threads(plan.threads_per_worker)
    _check_model(plan)
    keep_freed_memory()
    with kept.recorder.span("load", "load", first_layer=0, stop_layer=plan.model.num_layers):
        kept.whole = _load(plan, LayerRange(0, plan.model.num_layers), kept)
    largest = max(len(stage.layers) for stage in plan.token_pipeline.stages)
    kept.spare = _room(plan, largest, plan.token_pipeline.num_rows)
    logger.info("on standby with all %d layers: %.1f MiB", plan.model.num_layers, kept.whole.weight_bytes / 2**20)


def load_stage(plan: Plan, place: Place, kept: Kept) -> None:
    """The stage's own tensors and its pool are in memory; what was there for the same layers stays as it is.

    A pool of other layers, or of other microbatches, stays, too, as a source of its rows. Raises ConfigError for
    weights that do not fit the plan.
    """
    torch.set_num_threads(plan.threads_per_worker)
    before, kept.place = kept.place, place
    if place.pipeline.kind == "memory":
        kept.model = None
        return
    layers = place.stage.layers
    if kept.model is None or kept.model.layers != layers:
        _check_model(plan)
        keep_freed_memory()
        with kept.recorder.span("load", "load", first_layer=layers.start, stop_layer=layers.stop):
            kept.model = kept.whole.part(layers) if kept.whole is not None else _load(plan, layers, kept)
    _make_pool(plan, place, kept, before)
    _make_slots(plan, place, kept)
    logger.info(
        "layers [%d, %d) loaded: %.1f MiB of weights, %.1f MiB of KV pool",
        layers.start,
        layers.stop,
        kept.model.weight_bytes / 2**20,
        (kept.held.pool.nbytes if kept.held is not None else 0) / 2**20,
    )


def build_stage(surroundings: Surroundings, plan: Plan, place: Place, kept: Kept) -> BuiltStage:
    """The stage's threads run and wait for their first message.

    Raises ConfigError when the plan wants copies on disk and the folder is missing or refused.
    """
    around = surroundings
    host = Host(
        name=around.name,
        plan=plan,
        place=place,
        kept=kept,
        mailbox=around.mailbox,
        peers=around.peers,
        clock=around.clock,
        reach=around.reach,
        acknowledge=around.acknowledge,
        is_asked_to_stop=around.is_asked_to_stop,
        is_superseded=around.is_superseded,
    )
    kept.replicas.enter(around.cluster, plan, place)
    sources = Sources(host, kept, around.cluster)
    if kept.model is None:
        engine: StageEngine = MemoryEngine(host, sources)
        landing = Landing(around.mailbox, None, kept.replicas)
        return BuiltStage(engine=engine, kept=kept, out=Outflow(), landing=landing)
    inbox = None if kept.held is None else kv_inbox(around.cluster, plan, place)
    flow = Flow(around.cluster, plan, place, around.peers, around.mailbox, kept.recorder)
    out = outflow(flow, kept.held, around.kv_folder)
    rows = None if kept.held is None else kept.held.rows
    memory = swapped_or_resident(host, are_copied=bool(out.copiers))
    compute = StageCompute(kept.model, place, pool=host.pool, step_pool=None if memory is None else memory.pool)
    engine = Engine(
        host,
        Passes(host, compute, rows, memory, out),
        rows=rows,
        ring=_ring(place) if place.pipeline.kind != "prompt" and place.is_first else None,
        landed=_landed(inbox, place, kept),
        memory=memory,
        out=out,
        sources=sources,
    )
    landing = Landing(around.mailbox, inbox, kept.replicas)
    return BuiltStage(engine=engine, kept=kept, out=out, landing=landing, memory=memory)


def _load(plan: Plan, layers: LayerRange, kept: Kept) -> StageComputation:
    if plan.model.modelled is not None:
        return ModelledStage(spec=plan.model, layers=layers, times=plan.model.modelled, pace=kept.pace)
    return StageModel.load(plan.model, layers, plan.device)


def _make_pool(plan: Plan, place: Place, kept: Kept, before: Place | None) -> None:
    layers, num_rows = place.stage.layers, place.pipeline.num_rows
    held = kept.held
    if held is not None and held.pool.layers == layers and _has_shape(held, place) and _keeps_rows(place):
        return
    # One that got no rows before the next failure is no source; the one before it still is.
    if held is not None and before is not None and held.rows.num_positions:
        kept.former.insert(0, held)
    held = kept.held = None
    if _keeps_rows(place):
        memory = kept.spare
        if memory is None or memory.numel() < KvPool.pool_bytes(plan.model.layout, layers, num_rows):
            memory = _room_beside(plan, len(layers), num_rows, kept)
        pool = KvPool(plan.model.layout, layers, num_rows, plan.rows_device, memory=memory)
        kept.spare = None
        kept.held = HeldPool(pool=pool, rows=PoolRows(place.pipeline.microbatch_rows))


def _make_slots(plan: Plan, place: Place, kept: Kept) -> None:
    layers, num_rows = place.stage.layers, NUM_SLOTS * place.pipeline.microbatch_rows
    if not (plan.swapping and _keeps_rows(place)):
        kept.slots = None
    elif kept.slots is None or kept.slots.layers != layers or kept.slots.num_rows != num_rows:
        kept.slots = None
        kept.slots = KvPool(plan.model.layout, layers, num_rows, plan.device)
        logger.info("swapping: two slots of %.1f MiB on %s", kept.slots.nbytes / 2 / 2**20, plan.device)


def _room_beside(plan: Plan, num_layers: int, num_rows: int, kept: Kept) -> Tensor:
    """Memory for a pool, beside those of former epochs; on a device too small for all, in their place."""
    is_awaited = plan.epoch > FIRST_EPOCH
    try:
        return _room(plan, num_layers, num_rows, is_awaited=is_awaited)
    except torch.OutOfMemoryError:
        if not kept.former:
            raise
        logger.warning(
            "%s has no room for the new pool beside the former one: its rows are computed again", plan.device
        )
        kept.former.clear()
    return _room(plan, num_layers, num_rows, is_awaited=is_awaited)


def _room(plan: Plan, num_layers: int, num_rows: int, *, is_awaited: bool = False) -> Tensor:
    """Zeroed memory for a pool; where a cluster that serves waits for it, without its pages, if it may lack them."""
    is_pinned = plan.rows_device != plan.device
    if is_awaited and plan.rows_device == "cpu" and not is_pinned:
        return fresh_zeros(num_rows * plan.model.layout.row_bytes(num_layers))
    return KvPool.room(plan.model.layout, num_layers, num_rows, plan.rows_device, pin=is_pinned)


def _has_shape(held: HeldPool, place: Place) -> bool:
    """Whether each row of the pipeline has its place there, where the pipeline looks for it."""
    pipeline = place.pipeline
    return held.pool.num_rows == pipeline.num_rows and held.rows.microbatch_rows == pipeline.microbatch_rows


def _keeps_rows(place: Place) -> bool:
    return place.pipeline.kind in ("token", "colocated")


def _landed(inbox: KvInbox | None, place: Place, kept: Kept) -> LandedRows | None:
    if inbox is None or kept.held is None:
        return None
    return LandedRows(inbox, kept.held.pool, place.pipeline.microbatch_rows, kept.recorder)


def _check_model(plan: Plan) -> None:
    """This machine's copy of the model is the plan's. Raises ConfigError with both hashes."""
    if plan.model.modelled is not None:
        # A rehearsal reads no copy.
        return
    here = describe(Path(plan.model.folder), plan.model.dtype, plan.model.max_length)
    if here.model_hash != plan.model.model_hash:
        raise ConfigError(
            f"the model in {plan.model.folder} is not the plan's: "
            f"its hash is {here.model_hash} here and {plan.model.model_hash} in the plan"
        )


def _ring(place: Place) -> Ring:
    stages = place.pipeline.depth if place.pipeline.kind == "token" else 0
    return Ring(num_microbatches=place.pipeline.in_flight, num_ready_stages=stages)
