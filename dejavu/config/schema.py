"""The shape of a declaration: one dataclass a config group, every key with its type, unit and default.

Values lie in ``conf/``; a field of ``Config`` and its group share a name. The classes are not frozen because Hydra
cannot override frozen nodes; past ``load`` nothing writes to them. Members of the enums are named as the user
writes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from dejavu.config.apply import ApplyConfig
from dejavu.config.bench import BenchConfig
from dejavu.config.cluster import ClusterConfig
from dejavu.config.fault import FaultConfig
from dejavu.config.planning import ProfileConfig, ProfilingConfig, ShapeConfig
from dejavu.config.rates import RatesConfig
from dejavu.config.rehearsal import DEFAULT_KV_SCALE, Compute
from dejavu.config.serve import ServeConfig
from dejavu.config.simulate import SimulateConfig
from dejavu.config.strategy import StrategyConfig, Streaming, StreamTo
from dejavu.config.swap import SwapConfig

SHAPE_KINDS = (
    "gpt2-1.5b",
    "opt-13b",
    "opt-30b",
    "opt-66b",
    "bloom-176b",
    "llama2-70b",
    "llama3-8b",
    "qwen2.5-72b",
    "shape",
)
"""Models that are sizes alone, without weights: for planning, simulating and rehearsing."""
TINY_FAMILIES = ("gpt2", "opt", "bloom", "llama", "mistral", "qwen2", "qwen3")
MODEL_KINDS = (
    "smollm2-135m",
    "local",
    "hub",
    "random-opt-125m",
    "random-gpt2-124m",
    *(f"tiny-{family}" for family in TINY_FAMILIES),
    *SHAPE_KINDS,
)


class WorkflowName(Enum):
    """What a run does; a module of ``dejavu.workflows`` each."""

    generate = "generate"
    serve = "serve"
    streaming = "streaming"
    recovery = "recovery"
    plan = "plan"
    profile = "profile"
    simulate = "simulate"
    rates = "rates"
    bench = "bench"
    apply = "apply"
    status = "status"
    swapping = "swapping"


class Figure(Enum):
    """What a measurement compares, by the paper's figure: streaming levels, or ``off`` and ``full`` by batch size."""

    fig11 = "fig11"
    fig27 = "fig27"


class RecoveryFigure(Enum):
    """What a comparison of recoveries shows, by the paper's figure: tokens of one microbatch over time (4: what a
    failure costs without recovery; 14: every way to recover), or requests over time."""

    fig04 = "fig04"
    fig14 = "fig14"
    fig15 = "fig15"


class RecoveryCase(Enum):
    """One run of a comparison: without the faults, or with them and one ``strategy.recovery``."""

    none = "none"
    replica = "replica"
    recompute = "recompute"
    restart = "restart"


class Dtype(Enum):
    """The number format of weights, activations and KV."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class TransportKind(Enum):
    """What carries messages between workers."""

    ucx = "ucx"


class WorkloadKind(Enum):
    """Where requests come from."""

    chat = "chat"
    file = "file"
    synthetic = "synthetic"
    trace = "trace"


class BadLines(Enum):
    """What becomes of a malformed line of a trace."""

    refuse = "refuse"
    skip = "skip"


class StoreKind(Enum):
    """Who runs etcd: this run, or somebody else."""

    embedded = "embedded"
    external = "external"


@dataclass(kw_only=True)
class WorkflowConfig:
    """What to do."""

    name: WorkflowName = WorkflowName.generate


@dataclass(kw_only=True)
class ModelConfig:
    """The model and how it is held."""

    kind: str = "smollm2-135m"
    """One of ``MODEL_KINDS``."""
    path: str | None = None
    """Folder of a ``local`` model; absolute once loaded."""
    name: str | None = None
    """Hub id of a ``hub`` model."""
    dtype: Dtype | None = None
    """None: the dtype in which the weights are stored."""
    max_length: int | None = None
    """Most positions of a request, prompt and new tokens together; None: the model's own limit, at most 2048."""
    seed: int = 0
    """Of the random weights of a tiny or random model."""
    num_layers: int | None = None
    """Of a tiny model."""
    num_heads: int | None = None
    """Of a tiny model."""
    num_kv_heads: int | None = None
    """Of a tiny model; None: as many as heads."""
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    """Of a model that is planned for or rehearsed, and not run; one of ``SHAPE_KINDS``."""
    compute: Compute = Compute.real
    time_scale: float = 1.0
    """Of a rehearsal (``compute=modelled``): what the profile's times are multiplied with."""
    kv_scale: float = DEFAULT_KV_SCALE
    """Of a rehearsal: bytes of KV and activations, over those of the model; as near as whole heads come."""

    @property
    def is_shape(self) -> bool:
        """Nothing but sizes is known of this model: it can be planned for and rehearsed, and not run."""
        return self.kind in SHAPE_KINDS


@dataclass(kw_only=True)
class TransportConfig:
    """How workers exchange activations and KV."""

    kind: TransportKind = TransportKind.ucx
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables of the library; one that the user has set in the environment wins."""
    timeout_s: float = 60.0
    """Deadline of a transfer."""


@dataclass(kw_only=True)
class WorkloadConfig:
    """The requests and when they arrive."""

    kind: WorkloadKind = WorkloadKind.chat
    path: str | None = None
    """Of a ``file`` or ``trace``; absolute once loaded."""
    num_requests: int | None = None
    """The first so many; None: all that there are."""
    prompt_tokens: int | None = None
    """Length of a synthetic prompt; the most of a trace's prompts (None: as in the trace)."""
    max_tokens: int | None = None
    """New tokens of a request that says none itself; the most of a trace's outputs (None: as in the trace)."""
    median_tokens: float | None = None
    """Of a synthetic workload: the lengths of its answers are lognormal with this median, cut at ``max_tokens``;
    None: each is ``max_tokens``."""
    sigma: float = 0.0
    """Standard deviation of the logarithms of those lengths."""
    bad_lines: BadLines = BadLines.refuse
    """Of a trace."""
    ignore_eos: bool = False
    seed: int = 0
    rate: float | None = 0.0
    """Requests per second, a Poisson process; 0: all at once; None: the trace's own times."""


@dataclass(kw_only=True)
class StoreConfig:
    """etcd."""

    kind: StoreKind = StoreKind.embedded
    endpoints: list[str] = field(default_factory=list)
    """``host:port`` each, of an external store."""
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    timeout_s: float = 2.0
    """Of one call."""
    fsync: bool = False
    """Whether the embedded store waits for the disk at every write."""


@dataclass(kw_only=True)
class MeasurementConfig:
    """What ``workflow=streaming`` compares, on a cluster for each model and destination."""

    figure: Figure = Figure.fig11
    models: list[str] = field(default_factory=lambda: ["smollm2-135m", "random-opt-125m"])
    """Kinds of model; the other keys of ``model`` are those of each."""
    destinations: list[StreamTo] = field(default_factory=lambda: list(StreamTo))
    levels: list[Streaming] = field(default_factory=lambda: list(Streaming))
    batches: list[int] = field(default_factory=lambda: [4])
    """Rows of a batch: the first so many requests of the workload."""
    repeats: int = 3
    """Rounds; in each, every level serves every batch once, in an order that rotates from round to round."""


@dataclass(kw_only=True)
class ComparisonConfig:
    """What ``workflow=recovery`` compares: the same workload, with a cluster of its own for each case and round."""

    figure: RecoveryFigure = RecoveryFigure.fig14
    cases: list[RecoveryCase] = field(default_factory=lambda: list(RecoveryCase))
    """In the order of a round; the next round begins with the next one."""
    microbatch: int = 0
    """The one whose tokens are shown: the so many-th ``strategy.microbatch.token`` requests of the workload."""
    repeats: int = 3
    """Rounds; in each, every case runs once."""


@dataclass(kw_only=True)
class Config:
    """A whole declaration, one field a config group."""

    workflow: WorkflowConfig = field(default_factory=WorkflowConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    measurement: MeasurementConfig = field(default_factory=MeasurementConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    comparison: ComparisonConfig = field(default_factory=ComparisonConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)
    rates: RatesConfig = field(default_factory=RatesConfig)
    swap: SwapConfig = field(default_factory=SwapConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    apply: ApplyConfig = field(default_factory=ApplyConfig)
