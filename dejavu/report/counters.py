"""What a worker has counted since it began to serve; travels to the controller for ``metrics.json``."""

from __future__ import annotations

import msgspec


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
    swap_bytes: int = 0
    swap_hidden_s: float = 0.0
    swap_exposed_s: float = 0.0
    replica_bytes: int = 0
    replica_hidden_s: float = 0.0
    replica_exposed_s: float = 0.0

    kv: dict[str, int] = {}
    """Chunks by what became of them: ``accepted``, ``duplicate``, ``stale``, ``corrupt``, ..."""

    peak_rss_bytes: int = 0
    weight_bytes: int = 0
    kv_pool_bytes: int = 0

    @property
    def busy_share(self) -> float | None:
        """Share of the serving window spent computing; None before there was a window."""
        return self.compute_s / self.window_s if self.window_s > 0 else None
