"""The plan: which worker computes which layers of which pipeline, and in what batches. Lies in etcd as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

from dejavu.ids import Epoch, IncarnationId, WorkerName
from dejavu.kv.layout import LayerRange
from dejavu.kv.levels import StreamingLevel
from dejavu.models.spec import ModelSpec

PipelineKind = Literal["prompt", "token", "colocated", "memory"]
"""``memory`` computes nothing: its stages hold copies of the other stages' rows in host memory."""
StreamTarget = Literal["memory", "disk"]
Mode = Literal["colocated", "disaggregated"]
Scheduling = Literal["row", "microbatch"]
RecoveryTier = Literal["replica", "recompute", "restart"]
"""Where a row's KV comes from after a failure: from a copy; from its prompt and the tokens so far, as one prompt; or
from its prompt alone, token by token again (what serving without recovery does)."""
LONGEST_COPY_RUN_S = 0.5
"""Steps leave in one copy while it takes no longer than this: what has not left is made again after a failure."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's place in a pipeline."""

    worker: WorkerName
    index: int
    layers: LayerRange


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """Stages in order, layer 0 first, and the rows that go through them together."""

    kind: PipelineKind
    stages: tuple[Stage, ...]
    microbatch_rows: int
    """Most rows of one microbatch (of tokens in a colocated pipeline)."""
    in_flight: int = 1
    """Microbatches that are under way at once; for a token pipeline also the number of row groups its pool holds."""

    @property
    def depth(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def num_rows(self) -> int:
        """Rows of KV that each stage holds."""
        return self.microbatch_rows * self.in_flight


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where one worker stands in the plan."""

    pipeline: Pipeline
    stage: Stage

    @property
    def is_first(self) -> bool:
        """True for the stage that embeds."""
        return self.stage.index == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that samples."""
        return self.stage.index == self.pipeline.depth - 1

    @property
    def next_worker(self) -> WorkerName | None:
        """Who gets this stage's activations; None after the last stage."""
        return None if self.is_last else self.pipeline.stages[self.stage.index + 1].worker


class Fenced(msgspec.Struct, frozen=True, kw_only=True):
    """An incarnation that was declared dead: if it lives after all, it must not act for its name any more."""

    worker: WorkerName
    incarnation: IncarnationId


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan in force. A worker learns its role from it and from nothing else."""

    epoch: Epoch
    revision: int = 1
    """Of the declared state that it answers: it grows when that is changed while the cluster runs."""
    mode: Mode
    pipelines: tuple[Pipeline, ...]
    model: ModelSpec
    prompt_rows: int
    """Most rows of a prompt microbatch; in a colocated pipeline it differs from the token microbatch's."""
    prompt_tokens: int | None = None
    """Most tokens of a prompt microbatch, padding included; None: no limit."""
    scheduling: Scheduling
    device: str
    threads_per_worker: int
    timeout_s: float
    """Deadline of a transfer and of a row's KV, in seconds."""
    streaming: StreamingLevel = StreamingLevel.full
    """How KV leaves a stage."""
    stream_to: StreamTarget | None = None
    """Where the stages that keep rows send a copy of prompts and of every step; None: nowhere."""
    replication: int = 0
    """So many successors of each stage that keeps rows hold a copy of them."""
    copy_steps: int = 1
    """So many steps of a microbatch leave a stage in one copy at most, and none waits for longer than
    ``LONGEST_COPY_RUN_S``."""
    swapping: bool = False
    """Whether the stages that keep rows keep them in host memory, and two microbatches at a time on their device."""
    swapping_reason: str = ""
    """Why, where that was decided from what was measured."""
    bus_bytes_per_s: float | None = None
    """An emulated bus, over which KV comes into slots no faster; None: as fast as it does."""
    recovery: RecoveryTier = "replica"
    """The best tier that a repair may use; where a copy is missing, the row is recomputed."""
    standby: tuple[WorkerName, ...] = ()
    """Workers without a place that wait, loaded, for somebody to die."""
    fenced: tuple[Fenced, ...] = ()
    """Incarnations that were declared dead, the latest last."""

    @property
    def prompt_pipeline(self) -> Pipeline:
        """The pipeline that processes prompts."""
        return self._of("prompt")

    @property
    def token_pipeline(self) -> Pipeline:
        """The pipeline that generates tokens."""
        return self._of("token")

    @property
    def rows_device(self) -> str:
        """Where the rows of stages that keep them lie."""
        return "cpu" if self.swapping else self.device

    @property
    def is_replicated(self) -> bool:
        """True when some stage holds copies of other stages' rows."""
        return self.replication > 0 or bool(self.memory_stages)

    def successors_of(self, worker: WorkerName) -> tuple[Stage, ...]:
        """The stages that hold copies of this worker's rows: x+1, x+2, ... of the ring (DejaVu §4.2.3)."""
        return self._around(worker, 1)

    def predecessors_of(self, worker: WorkerName) -> tuple[Stage, ...]:
        """The stages whose rows this worker holds copies of, nearest first."""
        return self._around(worker, -1)

    def _around(self, worker: WorkerName, direction: int) -> tuple[Stage, ...]:
        stages = self.token_pipeline.stages
        at = next((stage.index for stage in stages if stage.worker == worker), None)
        if at is None:
            return ()
        return tuple(stages[(at + direction * away) % len(stages)] for away in range(1, self.replication + 1))

    @property
    def memory_stages(self) -> tuple[Stage, ...]:
        """The stages that hold copies of rows; none where nothing is sent to memory."""
        return tuple(stage for pipeline in self.pipelines if pipeline.kind == "memory" for stage in pipeline.stages)

    def _of(self, kind: PipelineKind) -> Pipeline:
        for pipeline in self.pipelines:
            if pipeline.kind in (kind, "colocated"):
                return pipeline
        raise ValueError(f"plan of epoch {self.epoch} has no {kind} pipeline")

    @property
    def workers(self) -> tuple[WorkerName, ...]:
        """Every worker that the plan gives a place, once; not those on standby."""
        return tuple(stage.worker for pipeline in self.pipelines for stage in pipeline.stages)

    def place_of(self, worker: WorkerName) -> Place | None:
        """The worker's place, or None for a worker that the plan does not name."""
        for pipeline in self.pipelines:
            for stage in pipeline.stages:
                if stage.worker == worker:
                    return Place(pipeline=pipeline, stage=stage)
        return None

    def peers_of(self, worker: WorkerName) -> tuple[WorkerName, ...]:
        """The workers to which ``worker`` sends: activations, KV, copies, tokens, readiness, wishes for KV again."""
        place = self.place_of(worker)
        if place is None:
            return ()
        kind, layers = place.pipeline.kind, place.stage.layers
        peers = [] if kind == "memory" or place.next_worker is None else [place.next_worker]
        if kind in ("token", "colocated") and not place.is_first:
            peers.append(place.pipeline.stages[0].worker)
        match kind:
            case "prompt":
                peers += _holders(self.token_pipeline.stages, layers)
            case "token":
                peers += _holders(self.prompt_pipeline.stages, layers) + _holders(self.memory_stages, layers)
            case "colocated":
                peers += _holders(self.memory_stages, layers)
            case "memory":
                peers += _holders(self.token_pipeline.stages, layers)
        peers += [stage.worker for stage in (*self.successors_of(worker), *self.predecessors_of(worker))]
        return tuple(name for name in dict.fromkeys(peers) if name != worker)


def _holders(stages: tuple[Stage, ...], layers: LayerRange) -> list[WorkerName]:
    """The workers of those stages that share a layer with ``layers``."""
    return [stage.worker for stage in stages if stage.layers.start < layers.stop and layers.start < stage.layers.stop]
