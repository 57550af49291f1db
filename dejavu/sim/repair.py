"""Deaths in the simulator: the cluster's own rules say who replaces whom and how each row goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from dejavu.control.admission import Assigned
from dejavu.control.holdings import HeldRow, RowProgress, RowRestore
from dejavu.control.plan import Plan
from dejavu.control.recovery import copies_again, restore_of
from dejavu.control.replan import replaced, shrunk
from dejavu.control.ring import AdmittedRow
from dejavu.ids import Epoch, RowId, WorkerName
from dejavu.sim.engine import Action
from dejavu.sim.machinery import Machinery

if TYPE_CHECKING:
    from dejavu.sim.cluster import SimulatedCluster


@dataclass(slots=True, kw_only=True)
class RepairRecord:
    """One repair: which workers died, and what that cost. Mutable until it is over."""

    workers: list[WorkerName]
    failed_s: float
    fenced_s: float | None = None
    formed_s: float | None = None
    resumed_s: float | None = None
    """When the next token came."""
    pause_s: float | None = None
    """From the last token before it to the first after it; None where there was none before."""
    rows: dict[str, int] = field(default_factory=dict)
    """By how they went on."""
    prompt_tokens_recomputed: int = 0
    """Tokens, known ones included, that passed through prompt stages again."""
    tokens_replayed: int = 0
    """Tokens that are made again one by one."""
    restored_bytes: int = 0


class Repairs:
    """Of one cluster."""

    def __init__(self, cluster: SimulatedCluster, machinery: Machinery, *, may_grow: bool) -> None:
        self.records: list[RepairRecord] = []
        self._cluster = cluster
        self._machinery = machinery
        self._may_grow = may_grow
        self._dead: set[WorkerName] = set()
        """Since the last fence."""
        self._loading: set[WorkerName] = set()
        """New processes that are no standbys yet."""
        self._held: dict[WorkerName, list[HeldRow]] | None = None
        """While no epoch is in force: what lay where as the last one ended, without what died since."""
        self._plan: Plan | None = None
        """The one that is being formed."""
        self._last_token_s: float | None = None

    def kill(self, worker: WorkerName) -> None:
        """The worker is dead, and what it held is lost. A worker that is dead or unknown already: nothing happens."""
        cluster, plan = self._cluster, self._plan or self._cluster.plan
        station = cluster.stations.get(worker)
        if station is None or station.is_dead or worker in self._dead:
            return
        if worker not in plan.workers:
            self._loading.add(worker)
            station.die()
            self._start_process(worker)
            return
        station.die()
        self._dead.add(worker)
        if self._held is not None:
            self._held.pop(worker, None)
        record = self._record(worker)
        cluster.engine.after(self._machinery.detection_s, lambda: self._fence(record))

    def heard(self) -> None:
        """A token has come."""
        record = self.records[-1] if self.records else None
        if record is not None and record.formed_s is not None and record.resumed_s is None:
            record.resumed_s = self._cluster.engine.now_s
            if self._last_token_s is not None:
                record.pause_s = record.resumed_s - self._last_token_s

    def _record(self, worker: WorkerName) -> RepairRecord:
        """The repair that is going on, or a new one."""
        if self.records and self.records[-1].formed_s is None:
            self.records[-1].workers.append(worker)
        else:
            self.records.append(RepairRecord(workers=[worker], failed_s=self._cluster.engine.now_s))
        return self.records[-1]

    def _fence(self, record: RepairRecord) -> None:
        """The old epoch is over, and the next one's workers come together."""
        if not self._dead:
            return
        cluster, now_s = self._cluster, self._cluster.engine.now_s
        dead, self._dead = self._dead, set()
        if self._held is None:
            self._held = self._what_is_left(dead)
            self._last_token_s = cluster.last_token_s
        record.fenced_s = now_s
        cluster.epoch.end()
        for station in cluster.stations.values():
            station.drop_all()
        plan, is_new_process = self._chosen(self._plan or cluster.plan, dead)
        self._plan = plan
        delay_s = self._machinery.replacement_s if is_new_process else self._machinery.standby_s
        cluster.engine.after(delay_s, lambda: self._form(plan, record))

    def _what_is_left(self, dead: set[WorkerName]) -> dict[WorkerName, list[HeldRow]]:
        cluster = self._cluster
        unsent = cluster.admission.unsent
        rows = {}
        for row_id, state in cluster.states.items():
            row = cluster.admission.assigned(row_id)
            if row is not None and row_id not in unsent:
                rows[row_id] = (row.slot.microbatch, state)
        held = cluster.epoch.progress.held(rows)
        return {worker: own for worker, own in held.items() if worker not in dead}

    def _chosen(self, plan: Plan, dead: set[WorkerName]) -> tuple[Plan, bool]:
        """The next plan, and whether it waits for a new process."""
        ready = [name for name in plan.standby if name not in self._loading]
        by: dict[WorkerName, WorkerName] = {}
        for worker in (name for name in plan.workers if name in dead):
            if ready:
                by[worker] = ready.pop(0)
            elif self._may_grow:
                by[worker] = worker
        after = replaced(plan, dict.fromkeys(by), by)
        lost = [worker for worker in plan.workers if worker in dead and worker not in by]
        if lost:
            after = shrunk(after, dict.fromkeys([*lost, *self._loading]))
        former = [worker for worker, other in by.items() if other != worker and self._may_grow]
        for worker in former:
            self._loading.add(worker)
            self._start_process(worker)
        after = msgspec.structs.replace(after, epoch=Epoch(plan.epoch + 1), standby=(*after.standby, *former))
        return after, any(worker == other for worker, other in by.items())

    def _start_process(self, worker: WorkerName) -> None:
        def loaded() -> None:
            self._loading.discard(worker)
            self._cluster.stations[worker].revive()

        if self._may_grow:
            self._cluster.engine.after(self._machinery.replacement_s, loaded)

    def _form(self, plan: Plan, record: RepairRecord) -> None:
        """The plan's workers all serve, and every open row is on its way again."""
        if plan is not self._plan or self._dead & set(plan.workers):
            return
        cluster, held = self._cluster, self._held
        assert held is not None
        self._plan, self._held = None, None
        cluster.sent_bytes += cluster.epoch.links.sent_bytes
        record.formed_s = cluster.engine.now_s
        cluster.begin_epoch(plan)
        cluster.forget_waiting()
        rows = self._open_rows()
        restores = restore_of(plan, held, [self._progress(row) for row in rows])
        record.rows = dict(Counter(restore.tier for restore in restores))
        by_id = {restore.row_id: restore for restore in restores}
        self._count(record, rows, by_id)
        self._restore(plan, rows, by_id, held)
        cluster.run_prompts()
        cluster.epoch.look()

    def _open_rows(self) -> list[Assigned]:
        cluster = self._cluster
        unsent = cluster.admission.unsent
        rows = [cluster.admission.assigned(row_id) for row_id in cluster.states if row_id not in unsent]
        return [row for row in rows if row is not None]

    def _progress(self, row: Assigned) -> RowProgress:
        state = self._cluster.states[row.row_id]
        return RowProgress(row_id=row.row_id, num_prompt=state.num_prompt, num_tokens=state.num_tokens)

    def _count(self, record: RepairRecord, rows: Sequence[Assigned], by_id: Mapping[RowId, RowRestore]) -> None:
        for row in rows:
            state, restore = self._cluster.states[row.row_id], by_id[row.row_id]
            record.tokens_replayed += restore.replayed
            if restore.tier != "replica" and state.num_tokens:
                record.prompt_tokens_recomputed += state.num_prompt + state.num_tokens - restore.replayed

    def _restore(
        self,
        plan: Plan,
        rows: Sequence[Assigned],
        by_id: Mapping[RowId, RowRestore],
        held: Mapping[WorkerName, Sequence[HeldRow]],
    ) -> None:
        cluster, epoch = self._cluster, self._cluster.epoch
        again: dict[RowId, int] = {}
        groups: dict[int, list[AdmittedRow]] = {index: [] for index in cluster.steps}
        for row in rows:
            state, restore = cluster.states[row.row_id], by_id[row.row_id]
            state.begin_anew(restore.replayed, restore.length)
            state.num_resumed += 1
            if restore.tier == "replica":
                groups.setdefault(row.slot.microbatch, []).append(
                    state.admitted(row, ready_stages=plan.token_pipeline.depth)
                )
            else:
                again[row.row_id] = state.num_done
        cluster.admission.interrupt(again, ())
        epoch.ring.resume_at(cluster.steps)
        for group in groups.values():
            epoch.admit(group)
        self._fetch(plan, [by_id[row.row_id] for row in rows], held)

    def _fetch(self, plan: Plan, restores: Sequence[RowRestore], held: Mapping[WorkerName, Sequence[HeldRow]]) -> None:
        """Each stage is ready for a row when what it lacks of it has come; copies that were lost are made again."""
        cluster, links = self._cluster, self._cluster.epoch.links
        lost = {(copy.worker, copy.row_id) for copy in copies_again(plan, held, restores)}
        for restore in restores:
            if restore.tier != "replica":
                continue
            state = cluster.states[restore.row_id]
            for stage in plan.token_pipeline.stages:
                if (stage.worker, restore.row_id) not in lost:
                    state.copied.add(stage.index)
                fetches = [fetch for fetch in restore.fetches if fetch.target == stage.worker]
                arrived = _after(len(fetches), self._ready(restore.row_id, stage.index))
                for fetch in fetches:
                    num_bytes = links.kv_bytes(len(fetch.layers), fetch.length)
                    self.records[-1].restored_bytes += num_bytes
                    links.send(fetch.source, fetch.target, num_bytes, arrived)
                if not fetches:
                    cluster.engine.after(0.0, arrived)

    def _ready(self, row_id: RowId, stage_index: int) -> Action:
        epoch = self._cluster.epoch

        def ready() -> None:
            epoch.ready(row_id, stage_index)
            if not epoch.is_over:
                epoch.look()

        return ready


def _after(count: int, action: Action) -> Action:
    """An action that does ``action`` when it is called for the ``count``-th time; at the first time for 0."""
    left = count

    def one() -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            action()

    return one
