"""The copies that a worker holds of other stages' rows, and what it may acknowledge of them."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from dejavu.control.holdings import HeldRow
from dejavu.control.plan import Place, Plan, Stage
from dejavu.errors import InvalidTransition
from dejavu.ids import RowId
from dejavu.kv.chunk import KvMessage
from dejavu.kv.layout import LayerRange
from dejavu.kv.replica import ReplicaLimits, ReplicaStore
from dejavu.kv.route import Holding
from dejavu.kv.stream import LandedRow

logger = logging.getLogger(__name__)


class Replicas:
    """A store for each stage whose rows are copied here, by its layers; the stores outlive epochs.

    Those that the plan in force does not want any more stay as sources until ``forget_sources``. The landing thread
    reads them; everything else is for the main thread.
    """

    def __init__(self) -> None:
        self._stores: dict[LayerRange, ReplicaStore] = {}
        self._wanted: dict[LayerRange, Stage] = {}
        self._nearest: LayerRange | None = None
        self._lock = threading.Lock()
        self._acks: dict[LayerRange, dict[int, int]] = {}
        self._is_news = False
        self._forgotten: Counter[str] = Counter()

    def enter(self, cluster: str, plan: Plan, place: Place) -> None:
        """The plan is in force: its chunks land here, and those of older epochs do not."""
        if place.pipeline.kind == "memory":
            copied: tuple[Stage, ...] = (place.stage,)
        else:
            copied = plan.predecessors_of(place.stage.worker)
        self._wanted = {stage.layers: stage for stage in copied}
        self._nearest = copied[0].layers if copied and place.pipeline.kind != "memory" else None
        for layers in self._wanted:
            if layers not in self._stores:
                self._stores[layers] = _store(cluster, plan, place, layers)
        for layers, store in self._stores.items():
            store.renew(plan.epoch, _max_bytes(plan, layers))
        with self._lock:
            self._acks = {layers: steps for layers, steps in self._acks.items() if layers in self._wanted}

    def store_for(self, layers: LayerRange) -> ReplicaStore | None:
        """Where copies of these layers land in the epoch in force, or None when they are none."""
        for held, _ in self._wanted.items():
            if held.start <= layers.start and layers.stop <= held.stop:
                return self._stores[held]
        return None

    def acknowledge(self, store: ReplicaStore, message: KvMessage) -> None:
        """The message's step counts as copied if all its rows are here up to their new cells. Landing thread."""
        if message.step is None:
            return
        if any(store.length(chunk.row_id) < chunk.positions[1] for chunk in message.chunks):
            return
        with self._lock:
            self._acks.setdefault(store.layers, {})[message.step.microbatch] = message.step.step
            self._is_news = True

    def news(self) -> Mapping[int, Mapping[int, int]]:
        """By stage: the last step of each microbatch that is copied here, where that has changed since the last call.

        Only of the nearest predecessor: the acknowledgements of one stage have one writer.
        """
        with self._lock:
            if not self._is_news or self._nearest is None:
                return {}
            self._is_news = False
            steps = dict(self._acks.get(self._nearest, {}))
        stage = self._wanted[self._nearest]
        return {stage.index: steps} if steps else {}

    def has_ended(self, row_id: RowId) -> bool:
        """True for a row that was released."""
        return any(store.has_ended(row_id) for store in self._stores.values())

    def release(self, row_ids: Iterable[RowId]) -> None:
        """The rows' copies are given up; late chunks of theirs are dropped."""
        for row_id in row_ids:
            for store in self._stores.values():
                store.release(row_id)

    def held(self) -> tuple[HeldRow, ...]:
        """Every row's copy, whole from position 0 up to its length."""
        return tuple(
            HeldRow(row_id, layers, length, True)
            for layers, store in self._stores.items()
            for row_id in store.row_ids
            if (length := store.length(row_id))
        )

    def length(self, row_id: RowId) -> int:
        """So many positions of the row are here in the store that has most of them."""
        return max((store.length(row_id) for store in self._stores.values()), default=0)

    def landed(self, row_id: RowId, layers: LayerRange, length: int) -> LandedRow:
        """A copy's positions [0, length) in all layers of its store. Raises InvalidTransition unless they are here."""
        for held, store in self._stores.items():
            inside = held.start <= layers.start and layers.stop <= held.stop
            if inside and store.length(row_id) >= length:
                return store.landed(row_id, length)
        raise InvalidTransition(f"row {row_id}: no copy of layers {layers} has {length} positions here")

    def forget_sources(self) -> None:
        """Stores that only served as sources of the last restore are gone."""
        for layers in [layers for layers in self._stores if layers not in self._wanted]:
            self._forgotten.update(asdict(self._stores.pop(layers).counters))

    def counts(self) -> dict[str, int]:
        """Chunks by what became of them."""
        totals = Counter(self._forgotten)
        for store in self._stores.values():
            totals.update(asdict(store.counters))
        return dict(totals)

    @property
    def nbytes(self) -> int:
        """Host bytes of all copies."""
        return sum(store.nbytes for store in self._stores.values())

    @property
    def used_bytes(self) -> int | None:
        """Host bytes of the copies of rows that go on; None where no copies are kept."""
        return sum(store.used_bytes for store in self._stores.values()) if self._stores else None


def _store(cluster: str, plan: Plan, place: Place, layers: LayerRange) -> ReplicaStore:
    return ReplicaStore(
        cluster=cluster,
        epoch=plan.epoch,
        layout=plan.model.layout,
        holding=Holding(owner=place.stage.worker, layers=layers, heads=(0, plan.model.num_kv_heads)),
        limits=ReplicaLimits(max_bytes=_max_bytes(plan, layers)),
    )


def _max_bytes(plan: Plan, layers: LayerRange) -> int:
    """Room for as many whole rows as the token stages hold, and as many that have ended."""
    return 2 * plan.token_pipeline.num_rows * plan.model.layout.row_bytes(len(layers))
