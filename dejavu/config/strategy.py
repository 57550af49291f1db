"""The shape of the group ``strategy``: how the model is spread over the workers. See ``schema.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class StrategyMode(Enum):
    """Whether prompts and tokens have pipelines of their own."""

    disaggregated = "disaggregated"
    colocated = "colocated"
    auto = "auto"
    """The planner decides, before workers start."""


class Scheduling(Enum):
    """What is replaced in a token microbatch: a finished row at once, or the whole microbatch when all rows ended."""

    row = "row"
    microbatch = "microbatch"


class Streaming(Enum):
    """How KV leaves a stage, each level adding one optimisation of the paper's; see ``dejavu.kv.levels``."""

    off = "off"
    naive = "naive"
    buffered = "buffered"
    layerwise = "layerwise"
    full = "full"


class StreamTo(Enum):
    """Where the stages that keep rows send a copy of their KV: a further worker's host memory, or their own disk."""

    memory = "memory"
    disk = "disk"


class Swapping(Enum):
    """Whether the stages that keep rows keep them in host memory, and two microbatches at a time on their device."""

    off = "off"
    on = "on"
    auto = "auto"
    """On where the rows do not fit the device otherwise; decided before the start, with the reason."""


class Recovery(Enum):
    """The best that a repair may do for a row: go on from its copy; compute its prompt and its tokens so far as one
    prompt; or begin it again, token by token, which is the baseline of the paper's figures."""

    replica = "replica"
    recompute = "recompute"
    restart = "restart"


@dataclass(kw_only=True)
class SplitConfig:
    """Depths of the two pipelines of a disaggregated strategy."""

    prompt: int = 1
    token: int = 1


@dataclass(kw_only=True)
class LayersConfig:
    """Explicit layer ranges [start, stop) of the stages, in order; None: cut evenly."""

    prompt: list[list[int]] | None = None
    token: list[list[int]] | None = None
    colocated: list[list[int]] | None = None


@dataclass(kw_only=True)
class MicrobatchConfig:
    """Most rows of a microbatch of each kind."""

    prompt: int = 4
    prompt_tokens: int | None = 512
    """Most tokens of a prompt microbatch, padding included; a longer prompt goes alone. None: no limit."""
    token: int = 16


@dataclass(kw_only=True)
class StrategyConfig:
    """How the model is spread over the workers and in what portions requests pass through."""

    mode: StrategyMode = StrategyMode.disaggregated
    split: SplitConfig = field(default_factory=SplitConfig)
    """Of a disaggregated strategy."""
    stages: int = 1
    """Depth of a colocated pipeline."""
    layers: LayersConfig = field(default_factory=LayersConfig)
    microbatch: MicrobatchConfig = field(default_factory=MicrobatchConfig)
    in_flight: int | None = None
    """Token microbatches under way at once; None: the depth of the token pipeline, and of a split whose microbatches
    are replaced as a whole, that of both: while the next prompts are computed, their places hold no tokens."""
    scheduling: Scheduling = Scheduling.row
    streaming: Streaming = Streaming.full
    stream_to: StreamTo | None = None
    """Where the KV of prompts and of every step is copied to; None: nowhere."""
    stream_folder: str | None = None
    """Of ``stream_to=disk``: a folder on the disk to use; absolute once loaded. None: in the run's output folder."""

    swapping: Swapping = Swapping.off
    replication: int = 0
    """So many successors of each stage that keeps rows hold a copy of them; 0: nobody does."""
    copy_steps: int = 4
    """So many steps of a microbatch leave a stage in one copy at most: fewer messages, more steps to make again."""
    recovery: Recovery = Recovery.replica
    """Where no copy is left, ``replica`` means ``recompute``."""
    standby: int = 0
    """Workers that wait, loaded, to take a dead one's place."""
    may_grow: bool = True
    """Whether a new process may take a dead worker's place; where not, its layers go to the survivors."""

    @property
    def depths(self) -> dict[str, int]:
        """Stages of each pipeline that this strategy has, by the pipeline's kind; of ``auto``, none is known yet."""
        memory = {"memory": 1} if self.stream_to is StreamTo.memory else {}
        if self.mode is StrategyMode.auto:
            return memory
        if self.mode is StrategyMode.colocated:
            return {"colocated": self.stages, **memory}
        return {"prompt": self.split.prompt, "token": self.split.token, **memory}

    @property
    def num_workers_needed(self) -> int:
        """A worker a stage, without those on standby."""
        return sum(self.depths.values())

    @property
    def num_workers(self) -> int:
        """Workers that are started: one a stage, and those on standby."""
        return self.num_workers_needed + self.standby

    @property
    def ring_depth(self) -> int:
        """Stages of the pipeline that keeps rows: the ring in which copies go to successors."""
        return self.stages if self.mode is StrategyMode.colocated else self.split.token

    @property
    def num_in_flight(self) -> int:
        """Token microbatches under way at once."""
        if self.in_flight is not None:
            return self.in_flight
        if self.mode is StrategyMode.disaggregated and self.scheduling is Scheduling.microbatch:
            return self.split.prompt + self.split.token
        return self.ring_depth
