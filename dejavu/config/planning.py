"""The shapes of what a plan is made from: the group ``profile`` and a model without weights. See ``schema.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class ProfileKind(Enum):
    """Where the times of prompts and tokens come from."""

    measured = "measured"
    published = "published"
    roofline = "roofline"
    given = "given"


@dataclass(kw_only=True)
class ProfileConfig:
    """How long a microbatch takes: the planner's and the simulator's times."""

    kind: ProfileKind = ProfileKind.given
    prompt_time_s: float | None = None
    """Y: the prompts of a microbatch through the whole model on one machine. With ``token_time_s``, it wins over
    what the profile says."""
    token_time_s: float | None = None
    """t: one token for each row of a microbatch through the whole model on one machine. See ``prompt_time_s``."""
    streaming_overhead: float | None = None
    """m: what a prompt takes while its KV is streamed, over what it takes alone; at least 1. None: what
    ``cluster.link_gbps`` leaves exposed, or 1 where that is unknown."""
    path: str | None = None
    """Of ``measured``: the profile file; absolute once loaded."""
    hardware: str | None = None
    """Of ``published`` and ``roofline``: the name of the device."""
    engine: str | None = None
    """Of ``published``: on which engine it was measured; None: the first there is."""
    tflops: float | None = None
    """Of ``roofline``: 10^12 operations a second of one device in the model's dtype."""
    memory_gb_per_s: float | None = None
    """Of ``roofline``: of one device's memory."""
    compute_efficiency: float = 1.0
    """Of ``roofline``: the part of ``tflops`` that prompts reach."""
    memory_efficiency: float = 1.0
    """Of ``roofline``: the part of ``memory_gb_per_s`` that steps reach."""

    @property
    def effective_kind(self) -> ProfileKind:
        """``given`` where both times are, whatever was chosen."""
        times_are_given = self.prompt_time_s is not None and self.token_time_s is not None
        return ProfileKind.given if times_are_given else self.kind


@dataclass(kw_only=True)
class ProfilingConfig:
    """What ``workflow=profile`` measures: every number of rows with every length of prompt."""

    rows: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    """Of a microbatch."""
    prompt_tokens: list[int] = field(default_factory=lambda: [64, 256, 512])
    """Of each row's prompt; its steps then have that context, and a little more."""
    steps: int = 8
    """After each microbatch's prompts."""
    repeats: int = 3
    """Rounds; of a point, the median counts."""
    neighbours: int = 0
    """Workers that compute beside the measured one all the while: of a cluster with n workers on this machine, n - 1.
    They share its memory's bandwidth and caches, and a step takes longer."""


@dataclass(kw_only=True)
class ShapeConfig:
    """The sizes of a model of which nothing is run: for planning and simulating."""

    num_layers: int = 0
    hidden_size: int = 0
    num_heads: int = 0
    num_kv_heads: int | None = None
    """None: as many as heads."""
    head_dim: int | None = None
    """None: ``hidden_size`` over ``num_heads``."""
    feed_forward_size: int = 0
    feed_forward_matrices: int = 2
    """2: up and down; 3: with a gate."""
    has_biases: bool = True
    """Whether matrices and norms have them."""
    vocab_size: int = 0
    num_positions: int | None = None
    """Of a table of learned positions; None: the model has none."""
