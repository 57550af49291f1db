"""What a worker process keeps through epochs: weights, pools with their rows, copies, and its account of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dejavu.control.plan import Place
from dejavu.engine.meter import Meter
from dejavu.engine.pool_rows import PoolRows
from dejavu.engine.replicas import Replicas
from dejavu.kv.pool import KvPool
from dejavu.kv.stream_account import StreamerCounters
from dejavu.models.stage import StageModel
from dejavu.report.spans import SpanRecorder


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPool:
    """A pool and what lies in it."""

    pool: KvPool
    rows: PoolRows


@dataclass(slots=True, kw_only=True)
class Totals:
    """What the ended epochs have counted."""

    handoffs: list[StreamerCounters] = field(default_factory=list)
    copiers: list[StreamerCounters] = field(default_factory=list)
    kv: Counter[str] = field(default_factory=Counter)

    def end_epoch(
        self, handoffs: Iterable[StreamerCounters], copiers: Iterable[StreamerCounters], kv: dict[str, int]
    ) -> None:
        """An epoch's counters are part of the totals."""
        self.handoffs.extend(handoffs)
        self.copiers.extend(copiers)
        self.kv.update(kv)


@dataclass(slots=True, kw_only=True)
class Kept:
    """Main thread only. Everything else of a stage is made anew for each epoch."""

    recorder: SpanRecorder
    meter: Meter
    whole: StageModel | None = None
    """A standby's model: every stage is a part of it."""
    spare: Tensor | None = None
    """A standby's zeroed memory for the pool of any stage."""
    model: StageModel | None = None
    """The stage's model; None on a stage that computes nothing."""
    held: HeldPool | None = None
    """The stage's pool; None on a stage that keeps no rows."""
    former: list[HeldPool] = field(default_factory=list)
    """Pools of other cuts of the layers, newest first, as sources of rows until they are restored."""
    replicas: Replicas = field(default_factory=Replicas)
    totals: Totals = field(default_factory=Totals)
    slow_s: float = 0.0
    """An injected fault: added before every piece of work."""
    place: Place | None = None
    """The place that model and pool were made for."""

    @property
    def pools(self) -> Sequence[HeldPool]:
        """Every pool that is here."""
        return self.former if self.held is None else [self.held, *self.former]

    def forget_sources(self) -> None:
        """What only served the last restore is gone."""
        self.former = []
        self.replicas.forget_sources()
