"""What a worker has counted since it began to serve; travels to the controller for ``metrics.json``."""

from __future__ import annotations

import msgspec


class RehearsalCounters(msgspec.Struct, frozen=True, kw_only=True):
    """How a stage that waits instead of computing kept to its times."""

    time_scale: float
    """What the profile's times were multiplied with."""
    kv_scale: float
    """Bytes of KV here, over bytes of the model's KV."""
    passes: int
    planned_s: float
    """What the passes should have taken."""
    late_s: float
    """By how much they ended too late, together."""
    most_late_s: float
    """By how much the latest of them did."""


class SwapTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage that swaps copied between host memory and its device, and how long steps waited for it."""

    bytes_in: int = 0
    bytes_out: int = 0
    """Prompts that were computed here included: they are written to host memory at once."""
    unused_bytes: int = 0
    """Of ``bytes_in``: for a step that did not come, because another microbatch did or the row ended."""
    busy_s: float = 0.0
    """Copying, on any thread."""
    own_s: float = 0.0
    """Of ``busy_s``: by the computing thread itself."""
    wait_s: float = 0.0
    """The computing thread stood still: a step's cells were not in, or cells that somebody reads were not out."""
    steps: int = 0
    waits: int = 0
    """How often it did."""


class WorkerCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one stage. *Hidden* is transfer time under computation, *exposed* is time computation waited for it."""

    name: str
    pipeline: str
    """``prompt``, ``token`` or ``colocated``."""
    stage: int
    layers: tuple[int, int]
    """Global layer numbers [start, stop)."""
    compute_s: float = 0.0
    window_s: float = 0.0
    """Serving time over which the rest was counted: from the first work to the last."""
    steps: int = 0
    prompts: int = 0

    stream_bytes: int = 0
    stream_hidden_s: float = 0.0
    stream_exposed_s: float = 0.0
    swap: SwapTotals = SwapTotals()
    replica_bytes: int = 0
    replica_hidden_s: float = 0.0
    replica_exposed_s: float = 0.0

    kv: dict[str, int] = {}
    """Chunks by what became of them: ``accepted``, ``duplicate``, ``stale``, ``corrupt``, ..."""

    peak_rss_bytes: int = 0
    weight_bytes: int = 0
    kv_pool_bytes: int = 0
    rehearsal: RehearsalCounters | None = None
    """Of a stage that rehearses."""

    @property
    def busy_share(self) -> float | None:
        """Share of the serving window spent computing; None before there was a window."""
        return self.compute_s / self.window_s if self.window_s > 0 else None


class LiveFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker tells of itself while it serves."""

    incarnation: str
    at_s: float
    """Of the worker's monotonic clock."""
    counters: WorkerCounters
    sent_bytes: dict[str, int] = {}
    """To each peer, in this epoch."""
    rows: dict[int, int] = {}
    """By microbatch: rows that have something written in the stage's pool."""
    kv_used_bytes: dict[str, int] = {}
    """KV of rows by where it lies: ``device``, ``host``, ``replica`` (copies of other stages' rows)."""
    kv_room_bytes: dict[str, int] = {}
    """Memory that is reserved for it; copies have no reserved room."""
