"""What a worker keeps from one epoch to the next: its table of rows, copies of others' rows, acknowledged steps."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch

from dejavu.clock import VirtualClock
from dejavu.control.holdings import HeldRow
from dejavu.control.plan import Place, Plan
from dejavu.engine import build
from dejavu.engine import messages as m
from dejavu.engine.acknowledgements import Acknowledgements
from dejavu.engine.build import new_kept
from dejavu.engine.kept import HeldPool, Kept
from dejavu.engine.outflow import Outflow
from dejavu.engine.pool_rows import PoolRows
from dejavu.engine.replicas import Replicas
from dejavu.engine.restoring import Restoring
from dejavu.errors import InvalidTransition
from dejavu.ids import Epoch, RowId, WorkerName
from dejavu.kv.chunk import KvMessage, StepMark, seal
from dejavu.kv.layout import LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.replica import ReplicaStore
from dejavu.kv.stream_account import StreamerCounters
from dejavu.kv.swap_counters import SwapCounters

from harness.plans import colocated_plan

A, B, C = RowId(1), RowId(2), RowId(3)
HEADS = (0, 2)


def plan_of(depth: int = 3, *, replication: int = 1, epoch: int = 1) -> Plan:
    return msgspec.structs.replace(colocated_plan(depth), replication=replication, epoch=Epoch(epoch))


def place_in(plan: Plan, name: str) -> Place:
    place = plan.place_of(WorkerName(name))
    assert place is not None
    return place


def prompt(row_id: RowId, microbatch: int, row_index: int, length: int = 3) -> m.PromptRow:
    return m.PromptRow(row_id, microbatch, row_index, length, None)


def test_rows_lie_at_their_places_and_count_what_is_written() -> None:
    rows = PoolRows(2)
    assert rows.begin([prompt(A, 0, 1), prompt(B, 1, 0)]) == {1, 2}
    assert [(rows.place_of(row), rows.length_of(row)) for row in (A, B, C)] == [(1, 0), (2, 0), (None, 0)]
    rows.written(A, 3)
    rows.written(C, 3)
    assert rows.held(LayerRange(0, 2)) == (HeldRow(A, LayerRange(0, 2), 3, False),)


def test_a_row_that_begins_turns_out_whoever_was_there() -> None:
    rows = PoolRows(2)
    rows.begin([prompt(A, 0, 0), prompt(B, 0, 1)])
    rows.written(A, 3)
    rows.begin([prompt(C, 0, 0)])
    rows.written(A, 9)
    assert (rows.place_of(A), rows.place_of(B), rows.place_of(C), rows.length_of(C)) == (None, 1, 0, 0)


def test_a_row_that_begins_again_has_nothing_written() -> None:
    rows = PoolRows(2)
    rows.begin([prompt(A, 0, 0)])
    rows.written(A, 3)
    rows.begin([prompt(A, 0, 0)])
    assert (rows.place_of(A), rows.length_of(A), rows.held(LayerRange(0, 1))) == (0, 0, ())


def test_a_released_row_is_forgotten() -> None:
    rows = PoolRows(2)
    rows.begin([prompt(A, 0, 0)])
    rows.release([A, C])
    rows.written(A, 1)
    assert (rows.place_of(A), rows.length_of(A)) == (None, 0)


def message(plan: Plan, layers: LayerRange, row_id: RowId, start: int, stop: int, step: int | None = None) -> KvMessage:
    """Cells of zeros, all heads."""
    payload = cells(plan, layers, start, stop)
    chunk = seal(
        epoch=plan.epoch,
        row_id=row_id,
        layers=layers,
        heads=HEADS,
        positions=(start, stop),
        dtype="float32",
        payload=payload,
    )
    mark = None if step is None else StepMark(0, step)
    return KvMessage(cluster="c", epoch=plan.epoch, chunks=(chunk,), step=mark)


def cells(plan: Plan, layers: LayerRange, start: int, stop: int) -> memoryview:
    return memoryview(bytearray(len(layers) * (stop - start) * plan.model.layout.position_bytes))


class Copies:
    """The replicas of a colocated stage, and what comes for them."""

    def __init__(self, plan: Plan, name: str, replicas: Replicas | None = None) -> None:
        self.plan = plan
        self.replicas = replicas or Replicas()
        self.replicas.enter("c", plan, place_in(plan, name))

    def store(self, layers: LayerRange) -> ReplicaStore:
        store = self.replicas.store_for(layers)
        assert store is not None
        return store

    def get(self, layers: LayerRange, row_id: RowId, start: int, stop: int, step: int | None = None) -> None:
        came = message(self.plan, layers, row_id, start, stop, step)
        store = self.store(layers)
        store.accept(came, cells(self.plan, layers, start, stop))
        self.replicas.acknowledge(store, came)


FIRST, SECOND, THIRD = LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 6)


@pytest.mark.parametrize(
    ("replication", "wanted"), [(0, ()), (1, (FIRST,)), (2, (FIRST, THIRD))], ids=["none", "one", "two"]
)
def test_a_stage_has_a_store_for_each_predecessor_it_copies(replication: int, wanted: Sequence[LayerRange]) -> None:
    replicas = Copies(plan_of(replication=replication), "w1").replicas
    assert [layers for layers in (FIRST, SECOND, THIRD) if replicas.store_for(layers) is not None] == list(wanted)
    assert replicas.store_for(LayerRange(1, 3)) is None, "over an edge of the stages"


def test_a_step_is_acknowledged_once_all_its_rows_are_here_without_a_gap() -> None:
    copies = Copies(plan_of(), "w1")
    copies.get(FIRST, A, 0, 3)
    assert copies.replicas.news() == {}
    copies.get(FIRST, A, 3, 4, step=1)
    assert copies.replicas.news() == {0: {0: 1}}
    assert copies.replicas.news() == {}, "no news since"
    copies.get(FIRST, A, 5, 6, step=3)
    assert copies.replicas.news() == {}, "position 4 is missing"
    copies.get(FIRST, A, 4, 5, step=2)
    assert copies.replicas.news() == {0: {0: 2}}


def test_only_the_nearest_holder_acknowledges_a_stages_steps() -> None:
    copies = Copies(plan_of(replication=2), "w1")
    copies.get(THIRD, A, 0, 1, step=1)
    assert copies.replicas.news() == {}
    copies.get(FIRST, A, 0, 1, step=1)
    assert copies.replicas.news() == {0: {0: 1}}


class FakeHost:
    def __init__(self, plan: Plan, kept: Kept) -> None:
        self.plan, self.kept = plan, kept
        self.written: list[tuple[str, int, bytes]] = []

    def acknowledge(self, pipeline: str, stage: int, value: bytes) -> None:
        self.written.append((pipeline, stage, value))


def test_the_store_gets_the_newest_steps_only_when_they_have_changed() -> None:
    kept = new_kept(VirtualClock())
    copies = Copies(plan_of(), "w1", kept.replicas)
    host = FakeHost(copies.plan, kept)
    acknowledgements = Acknowledgements(host)  # type: ignore[arg-type]
    for position in range(5):
        copies.get(FIRST, A, position, position + 1, step=position + 1)
    for _ in range(3):
        acknowledgements.publish()
    assert host.written == [("colocated", 0, b'{"0":5}')]


def test_copies_survive_the_end_of_an_epoch_and_old_chunks_do_not_come_any_more() -> None:
    copies = Copies(plan_of(), "w1")
    copies.get(FIRST, A, 0, 3)
    later = Copies(plan_of(epoch=2), "w1", copies.replicas)
    assert later.replicas.held() == (HeldRow(A, FIRST, 3, True),)
    later.store(FIRST).accept(message(copies.plan, FIRST, A, 3, 4), cells(copies.plan, FIRST, 3, 4))
    assert (later.store(FIRST).length(A), later.replicas.counts()["stale"]) == (3, 1)
    later.get(FIRST, A, 3, 4)
    assert later.store(FIRST).length(A) == 4


def test_copies_that_a_plan_does_not_want_are_sources_until_they_are_forgotten() -> None:
    copies = Copies(plan_of(), "w1")
    copies.get(FIRST, A, 0, 3, step=1)
    later = Copies(plan_of(2, epoch=2), "w1", copies.replicas)
    new = LayerRange(0, 3)
    assert later.replicas.store_for(new) is not None
    assert later.replicas.news() == {}
    assert later.replicas.held() == (HeldRow(A, FIRST, 3, True),)
    assert later.replicas.landed(A, LayerRange(1, 2), 3).layers == FIRST
    accepted = later.replicas.counts()["accepted"]
    later.replicas.forget_sources()
    assert (later.replicas.held(), later.replicas.counts()["accepted"]) == ((), accepted)
    with pytest.raises(InvalidTransition, match="no copy of layers"):
        later.replicas.landed(A, FIRST, 3)


def test_a_released_row_goes_from_every_store_and_does_not_come_back() -> None:
    copies = Copies(plan_of(replication=2), "w1")
    copies.get(FIRST, A, 0, 3)
    copies.get(THIRD, A, 0, 3)
    copies.replicas.release([A])
    copies.get(FIRST, A, 0, 3)
    assert (copies.replicas.held(), copies.replicas.length(A), copies.replicas.has_ended(A)) == ((), 0, True)


class FakeLanded:
    def __init__(self) -> None:
        self.expected: list[m.PromptRow] = []

    def expect(self, rows: Sequence[m.PromptRow]) -> tuple[RowId, ...]:
        self.expected += rows
        return tuple(row.row_id for row in rows if row.row_id == C)


class FakeOut(Outflow):
    def __init__(self) -> None:
        super().__init__()
        self.copied: list[tuple[RowId, int, int]] = []
        self.begun: list[frozenset[int]] = []

    def again(self, spans: Sequence[tuple[RowId, int, int]]) -> None:
        self.copied += spans

    def begin(self, places: frozenset[int]) -> None:
        self.begun.append(places)


def restored(row_id: RowId, row_index: int, length: int, *, is_here: bool) -> m.RestoredRow:
    return m.RestoredRow(row_id, 0, row_index, length, is_here)


def test_rows_that_are_here_are_whole_at_once_and_cut_to_where_they_go_on_from() -> None:
    rows, out = PoolRows(4), FakeOut()
    rows.begin([prompt(A, 0, 0), prompt(B, 0, 1)])
    rows.written(A, 9)
    restoring = Restoring(rows, FakeLanded(), out)  # type: ignore[arg-type]
    message = m.RestoreRows(
        epoch=Epoch(2), rows=(restored(A, 0, 7, is_here=True),), copies=(m.CopySpan(A, 2, 7), m.CopySpan(B, 0, 1))
    )
    assert restoring.begin(message) == ((A,), ())
    assert (rows.length_of(A), out.copied) == (7, [(A, 2, 7)])


def test_rows_that_come_are_copied_again_when_they_have_landed_and_are_not_prompts() -> None:
    rows, landed, out = PoolRows(4), FakeLanded(), FakeOut()
    restoring = Restoring(rows, landed, out)  # type: ignore[arg-type]
    away = (restored(B, 1, 5, is_here=False), restored(C, 2, 5, is_here=False))
    copies = (m.CopySpan(B, 0, 5),)
    assert restoring.begin(m.RestoreRows(epoch=Epoch(2), rows=away, copies=copies)) == ((), (C,))
    assert [(row.row_id, row.row_index, row.length) for row in landed.expected] == [(B, 1, 5), (C, 2, 5)]
    assert (rows.place_of(B), rows.length_of(B), out.copied) == (1, 0, [])
    assert restoring.take([A, B]) == (A,)
    assert out.copied == [(B, 0, 5)]
    assert restoring.take([B]) == (B,), "a row of that name that came by handoff later"


def test_pools_of_both_cuts_are_sources_until_they_are_forgotten() -> None:
    plan, kept = plan_of(), new_kept(VirtualClock())
    pools = [
        HeldPool(pool=KvPool(plan.model.layout, layers, 2), rows=PoolRows(2)) for layers in (FIRST, LayerRange(0, 3))
    ]
    kept.former, kept.held = [pools[0]], pools[1]
    assert list(kept.pools) == [pools[1], pools[0]]
    kept.forget_sources()
    assert list(kept.pools) == [pools[1]]


def test_what_ended_epochs_have_counted_stays_counted() -> None:
    kept = new_kept(VirtualClock())
    kept.totals.end_epoch([StreamerCounters(jobs=1)], [], {"accepted": 2}, SwapCounters(steps=3))
    kept.totals.end_epoch([], [StreamerCounters(jobs=3)], {"accepted": 1, "stale": 1}, SwapCounters(steps=1, waits=1))
    assert (len(kept.totals.handoffs), len(kept.totals.copiers)) == (1, 1)
    assert kept.totals.kv == {"accepted": 3, "stale": 1}
    assert kept.totals.swap == SwapCounters(steps=4, waits=1)


def test_a_device_without_room_for_two_pools_gives_up_the_rows_of_the_former_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, plan, seen = new_kept(VirtualClock()), plan_of(epoch=2), []
    kept.former = [HeldPool(pool=KvPool(plan.model.layout, LayerRange(0, 1), 2), rows=PoolRows(2))]

    def room(plan: Plan, num_layers: int, num_rows: int, *, is_awaited: bool) -> torch.Tensor:
        seen.append(len(kept.former))
        if kept.former or len(seen) > 2:
            raise torch.OutOfMemoryError("full")
        return torch.zeros(1)

    monkeypatch.setattr(build, "_room", room)
    assert build._room_beside(plan, 2, 4, kept).numel() == 1
    assert seen == [1, 0]
    with pytest.raises(torch.OutOfMemoryError):
        build._room_beside(plan, 2, 4, kept)
