"""Builds a stage as the plan gives it: model, pool, inbox, streamer, ring. The slow part of a worker's start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from dejavu.clock import Clock
from dejavu.control.plan import Place, Plan
from dejavu.control.ring import Ring
from dejavu.engine.compute import StageCompute
from dejavu.engine.engine import Engine
from dejavu.engine.heap import keep_freed_memory
from dejavu.engine.host import Host
from dejavu.engine.kv_ways import Flow, kv_inbox, outflow, replica_store
from dejavu.engine.landed import LandedRows
from dejavu.engine.landing import Landing
from dejavu.engine.mailbox import Mailbox
from dejavu.engine.memory_stage import MemoryEngine
from dejavu.engine.meter import Meter
from dejavu.engine.outflow import Outflow
from dejavu.engine.peers import Peers
from dejavu.errors import ConfigError
from dejavu.ids import WorkerName
from dejavu.kv.pool import KvPool
from dejavu.models.spec import describe
from dejavu.models.stage import StageModel
from dejavu.report.spans import SpanRecorder

logger = logging.getLogger(__name__)

_STAGING_BUFFERS = 4
_MOST_STAGING_BYTES = 8 * 2**20
"""Large enough that a message's fixed cost does not show, small enough that four of them are nothing."""


class StageEngine(Protocol):
    """What the main thread runs."""

    def run(self) -> None:
        """The controller has said ``Stop``. Raises Fatal when the stage cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStage:
    """A stage that can run once its links are up."""

    engine: StageEngine
    out: Outflow
    landing: Landing

    def close(self) -> None:
        """The stage's threads have ended."""
        self.out.close()
        self.landing.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStage:
    """The heavy parts: the model's weights and the KV pool."""

    model: StageModel | None
    """None on a memory stage."""
    pool: KvPool | None


def load_stage(plan: Plan, place: Place, recorder: SpanRecorder) -> LoadedStage:
    """The stage's own tensors and its pool are in memory. Raises ConfigError for weights that do not fit the plan."""
    torch.set_num_threads(plan.threads_per_worker)
    if place.pipeline.kind == "memory":
        return LoadedStage(model=None, pool=None)
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
    kv_folder: Path | None = None,
) -> BuiltStage:
    """The stage's threads run and wait for their first message.

    ``kv_folder`` is for copies on disk. Raises ConfigError when the plan wants them and it is missing or refused.
    """
    host = Host(
        name=name,
        plan=plan,
        place=place,
        loaded=loaded.model,
        pool=loaded.pool,
        mailbox=mailbox,
        peers=peers,
        recorder=recorder,
        meter=Meter(recorder),
        clock=clock,
        is_asked_to_stop=is_asked_to_stop,
    )
    if loaded.model is None:
        store = replica_store(cluster, plan, place)
        return BuiltStage(engine=MemoryEngine(host, store), out=Outflow(), landing=Landing(mailbox, store))
    kind = place.pipeline.kind
    inbox = kv_inbox(cluster, plan, place) if kind == "token" else None
    landed = None
    if inbox is not None and loaded.pool is not None:
        landed = LandedRows(inbox, loaded.pool, place.pipeline.microbatch_rows, recorder)
    out = outflow(Flow(cluster, plan, place, peers, mailbox, recorder), loaded.pool, kv_folder)
    engine = Engine(
        host,
        StageCompute(loaded.model, place, pool=loaded.pool),
        ring=_ring(place) if kind != "prompt" and place.is_first else None,
        landed=landed,
        out=out,
    )
    return BuiltStage(engine=engine, out=out, landing=Landing(mailbox, inbox))


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
