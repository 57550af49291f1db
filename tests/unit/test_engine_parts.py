"""The engine's small parts: slices and bytes of a step, landed rows, the meter, the view of the cluster."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dejavu.clock import VirtualClock
from dejavu.control.member import encode_json
from dejavu.control.ring import StepRow
from dejavu.engine import cluster_view
from dejavu.engine.cluster_view import ClusterView, ControllerEntry
from dejavu.engine.compute import RowSlice, buffer_of, prompt_ids, tensor_of
from dejavu.engine.landed import LandedRows
from dejavu.engine.messages import PromptRow
from dejavu.engine.meter import Meter, peak_rss_bytes
from dejavu.engine.worker_spec import WorkerSpec, decode_worker_spec
from dejavu.errors import Fatal
from dejavu.ids import Epoch, RowId, WorkerName
from dejavu.kv.inbox import KvInbox
from dejavu.kv.layout import LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.route import Holding
from dejavu.kv.swap_counters import SwapCounters
from dejavu.report.spans import SpanRecorder
from dejavu.store.entry import Entry
from dejavu.store.keys import Keys
from dejavu.store.spec import StoreSpec
from dejavu.store.watch import Change

from harness.plans import split_plan

A = RowId(1)
CPU = torch.device("cpu")


@given(indices=st.lists(st.integers(0, 30), min_size=1, unique=True).map(sorted), first=st.integers(0, 9))
def test_a_row_slice_runs_from_the_first_to_the_last_live_row(indices: list[int], first: int) -> None:
    rows = [StepRow(RowId(index), index, 0, 0, None) for index in indices]
    part = RowSlice.of(rows, first)
    assert [part.first_row + index for index in part.live] == [first + index for index in indices]
    assert part.num_rows == indices[-1] - indices[0] + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_activations_survive_as_bytes(dtype: torch.dtype) -> None:
    hidden = torch.randn(2, 3, 4).to(dtype).transpose(0, 1)
    buffer = buffer_of(hidden)
    assert (buffer.format, buffer.ndim) == ("B", 1)
    assert torch.equal(tensor_of(buffer, (-1, 2, 4), dtype, CPU), hidden)


def test_prompt_ids_are_read_row_by_row() -> None:
    ids = torch.tensor([[1, 2, 0], [3, 4, 5]], dtype=torch.int32)
    assert torch.equal(prompt_ids(buffer_of(ids), 2, CPU), ids.long())


class Landed:
    """Landed rows of a token stage that holds all of a small model."""

    def __init__(self) -> None:
        self.plan = split_plan(1, 1)
        layout = self.plan.model.layout
        holding = Holding(owner="w1", layers=LayerRange(0, 6), heads=(0, 2))
        self.inbox = KvInbox(cluster="c", epoch=Epoch(1), layout=layout, holding=holding)
        self.pool = KvPool(layout, LayerRange(0, 6), 4)
        self.rows = LandedRows(self.inbox, self.pool, 2, SpanRecorder(VirtualClock()))


def test_a_row_that_was_released_is_never_taken() -> None:
    landed = Landed()
    assert landed.rows.expect([PromptRow(A, 1, 1, 3, None)]) == ()
    landed.rows.release([A])
    assert landed.rows.take([A]) == ()
    assert landed.inbox.num_rows == 0


def test_a_row_nobody_expects_is_never_taken_and_its_chunks_are_unproven() -> None:
    landed = Landed()
    assert landed.rows.take([A]) == ()
    assert landed.rows.unproven([A]) == (A,)
    assert set(landed.rows.counts()) >= {"accepted", "corrupt", "stale"}


def test_the_meter_counts_work_and_ignores_waits_before_the_first() -> None:
    clock = VirtualClock()
    recorder = SpanRecorder(clock)
    meter = Meter(recorder)
    with meter.waiting():
        clock.advance(5.0)
    with meter.computing("prompt", rows=1):
        clock.advance(1.0)
    with meter.waiting():
        clock.advance(2.0)
    with meter.computing("step", rows=1):
        clock.advance(1.0)
    place = split_plan().place_of(WorkerName("w0"))
    assert place is not None
    counters = meter.counters(
        "w0",
        place,
        handoffs=(),
        copiers=(),
        are_replicas=False,
        kv={},
        weight_bytes=1,
        pool_bytes=2,
        swap=SwapCounters(bytes_in=3, waits=1),
    )
    assert (counters.compute_s, counters.window_s, counters.steps, counters.prompts) == (2.0, 4.0, 1, 1)
    assert counters.busy_share == 0.5
    assert (counters.swap.bytes_in, counters.swap.waits) == (3, 1)
    assert [span.name for span in recorder.snapshot()] == ["prompt", "wait", "step"]
    assert peak_rss_bytes() > 2**20


def test_a_worker_spec_survives_its_pipe_and_does_not_show_its_secret() -> None:
    spec = WorkerSpec(
        name=WorkerName("w0"),
        cluster="c",
        secret="s3cret",
        store=StoreSpec(endpoints=("127.0.0.1:1",), user="u", password="pa55"),
        host="127.0.0.1",
        lease_ttl_s=5.0,
        device="cpu",
        transport_kind="local",
        transport_settings={},
        start_timeout_s=1.0,
    )
    assert decode_worker_spec(msgspec.json.encode(spec)) == spec
    assert "s3cret" not in repr(spec)
    assert "pa55" not in repr(spec)


class FakeWatch:
    """A watch that delivers what the test puts."""

    def __init__(self, store: StoreSpec, prefix: str, take: Callable[[Change], None]) -> None:
        self.take = take

    def stop(self) -> None:
        pass


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> list[FakeWatch]:
    made: list[FakeWatch] = []

    def make(store: StoreSpec, prefix: str, take: Callable[[Change], None]) -> FakeWatch:
        made.append(FakeWatch(store, prefix, take))
        return made[-1]

    monkeypatch.setattr(cluster_view, "PrefixWatch", make)
    return made


def put(watch: FakeWatch, **values: bytes) -> None:
    keys = Keys("c")
    entries = tuple(
        Entry(key=keys.prefix + name, value=value, mod_revision=1, create_revision=1) for name, value in values.items()
    )
    watch.take(Change(puts=entries, deletes=(), revision=1))


def test_the_view_knows_the_plan_and_the_controller_once_the_watch_has_brought_them(
    watches: list[FakeWatch],
) -> None:
    view, plan = ClusterView(StoreSpec(endpoints=("127.0.0.1:1",)), Keys("c"), lambda: None), split_plan()
    assert (view.plan(), view.controller(), view.member("w0")) == (None, None, None)
    entry = ControllerEntry(incarnation="i", host="h", pid=1, address="a:1")
    put(watches[0], plan=encode_json(plan), controller=encode_json(entry))
    assert view.wait_for(view.plan, "a plan", 1.0) == plan
    assert view.controller() == entry
    watches[0].take(Change(puts=(), deletes=(Keys("c").controller,), revision=2))
    assert view.controller() is None
    view.close()


def test_what_does_not_appear_is_fatal_and_named(watches: list[FakeWatch]) -> None:
    view = ClusterView(StoreSpec(endpoints=("127.0.0.1:1",)), Keys("c"), lambda: None)
    with pytest.raises(Fatal, match=r"a plan did not appear in the store within 0 s"):
        view.wait_for(view.plan, "a plan", 0.0)


def test_a_plan_that_cannot_be_read_is_fatal_and_its_key_named(watches: list[FakeWatch]) -> None:
    view = ClusterView(StoreSpec(endpoints=("127.0.0.1:1",)), Keys("c"), lambda: None)
    put(watches[0], plan=b'{"epoch": "x"}')
    with pytest.raises(Fatal, match="/dejavu/c/plan cannot be read"):
        view.plan()
