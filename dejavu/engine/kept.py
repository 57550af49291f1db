"""What a worker process keeps through epochs: weights, pools with their rows, copies, and its account of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dejavu.clock import SystemClock
from dejavu.control.plan import Place
from dejavu.engine.meter import Meter
from dejavu.engine.pool_rows import PoolRows
from dejavu.engine.replicas import Replicas
from dejavu.kv.pool import KvPool
from dejavu.kv.stream_account import StreamerCounters
from dejavu.kv.swap_counters import SwapCounters
from dejavu.models.computation import StageComputation
from dejavu.models.pace import Pace
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
    swap: SwapCounters = field(default_factory=SwapCounters)

    def end_epoch(
        self,
        handoffs: Iterable[StreamerCounters],
        copiers: Iterable[StreamerCounters],
        kv: dict[str, int],
        swap: SwapCounters,
    ) -> None:
        """An epoch's counters are part of the totals."""
        self.handoffs.extend(handoffs)
        self.copiers.extend(copiers)
        self.kv.update(kv)
        self.swap += swap


@dataclass(slots=True, kw_only=True)
class Kept:
    """Main thread only. Everything else of a stage is made anew for each epoch."""

    recorder: SpanRecorder
    meter: Meter
    whole: StageComputation | None = None
    """A standby's model: every stage is a part of it."""
    spare: Tensor | None = None
    """A standby's zeroed memory for the pool of any stage."""
    model: StageComputation | None = None
    """The stage's model; None on a stage that computes nothing."""
    pace: Pace = field(default_factory=lambda: Pace(SystemClock()))
    """Of a stage that rehearses."""
    held: HeldPool | None = None
    """The stage's pool, in host memory on a stage that swaps; None on a stage that keeps no rows."""
    slots: KvPool | None = None
    """Memory of two microbatches on the device of a stage that swaps. What is in it does not outlive an epoch."""
    former: list[HeldPool] = field(default_factory=list)
    """Pools of other layers or other microbatches, newest first, as sources of rows until they are restored."""
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

    @property
    def kv_used_bytes(self) -> dict[str, int]:
        """Bytes of rows' KV by where they lie: ``device``, ``host`` (a stage that swaps), ``replica``."""
        used: dict[str, int] = {}
        if self.held is not None:
            pool = self.held.pool
            place = "device" if self.slots is None else "host"
            used[place] = self.held.rows.num_positions * pool.cell_bytes(pool.layers, pool.heads)
        copies = self.replicas.used_bytes
        if copies is not None:
            used["replica"] = copies
        return used

    @property
    def kv_room_bytes(self) -> dict[str, int]:
        """Bytes that are reserved for rows' KV, by the same places."""
        if self.held is None:
            return {}
        if self.slots is None:
            return {"device": self.held.pool.nbytes}
        return {"host": self.held.pool.nbytes, "device": self.slots.nbytes}

    def forget_sources(self) -> None:
        """What only served the last restore is gone."""
        self.former = []
        self.replicas.forget_sources()
