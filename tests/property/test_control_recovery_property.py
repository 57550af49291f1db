"""Whatever the survivors hold: a restore takes only what is there, and leaves every stage with what it promises."""

from __future__ import annotations

from itertools import chain

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from dejavu.control.holdings import HeldRow, RowProgress, RowRestore
from dejavu.control.placement import Declared, place
from dejavu.control.plan import Plan
from dejavu.control.recovery import copies_again, restore_of
from dejavu.control.replan import replaced, shrunk
from dejavu.errors import InfeasibleError
from dejavu.ids import Epoch, IncarnationId, RowId, WorkerName
from dejavu.kv.layout import LayerRange

from harness.plans import made_up_spec

Holdings = dict[WorkerName, list[HeldRow]]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any mode and depth, copies at up to every other stage, perhaps a memory stage and standbys."""
    is_colocated = draw(st.booleans())
    depth, prompt_depth = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    declared = Declared(
        mode="colocated" if is_colocated else "disaggregated",
        colocated_depth=depth,
        prompt_depth=prompt_depth,
        token_depth=depth,
        prompt_rows=2,
        token_rows=2,
        scheduling="row",
        stream_to=draw(st.sampled_from([None, "memory", "disk"])),
    )
    model = made_up_spec(num_layers=draw(st.integers(4, 8)), head_parameters=draw(st.sampled_from([0, 2000])))
    plan = place(declared, model, epoch=Epoch(1))
    first = len(plan.workers)
    standby = tuple(WorkerName(f"w{first + number}") for number in range(draw(st.integers(0, 2))))
    return msgspec.structs.replace(
        plan,
        replication=draw(st.integers(0, depth - 1)),
        recovery=draw(st.sampled_from(["replica"] * 4 + ["recompute", "restart"])),
        standby=standby,
    )


@st.composite
def rows_of(draw: st.DrawFn) -> list[RowProgress]:
    count = draw(st.integers(0, 4))
    return [
        RowProgress(
            row_id=RowId(number),
            num_prompt=draw(st.integers(1, 20)),
            num_tokens=draw(st.sampled_from([0, 1, 2, 9, 40])),
        )
        for number in range(1, count + 1)
    ]


@st.composite
def holdings_of(draw: st.DrawFn, plan: Plan, rows: list[RowProgress]) -> Holdings:
    """Sane holdings with lags, some workers missing, and holdings of any shape among them."""
    holdings: Holdings = {}
    for worker in (*plan.workers, WorkerName("stray")):
        if draw(st.integers(0, 4)) == 0:
            continue
        held = []
        stages = [stage for stage in plan.token_pipeline.stages if stage.worker == worker]
        pools = [(stage.layers, False) for stage in stages]
        pools += [(stage.layers, True) for stage in plan.predecessors_of(worker)]
        for row in rows:
            for layers, is_copy in pools:
                lag = draw(st.sampled_from([-1, 0, 0, 0, 1, 2, 5, 100]))
                held.append(HeldRow(row.row_id, layers, max(0, row.num_cells - lag), is_copy))
        odd = st.builds(
            lambda row_id, start, count, length, is_copy: HeldRow(
                RowId(row_id), LayerRange(start, min(start + count, plan.model.num_layers)), length, is_copy
            ),
            st.integers(1, 6),
            st.integers(0, plan.model.num_layers - 1),
            st.integers(1, 8),
            st.integers(0, 60),
            st.booleans(),
        )
        holdings[worker] = held + draw(st.lists(odd, max_size=3))
    return holdings


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, Holdings, list[RowProgress]]:
    """A plan after a death or two, and what is held of pools that an earlier plan cut."""
    before = draw(plans())
    rows = draw(rows_of())
    holdings = draw(holdings_of(before, rows))
    dead = dict.fromkeys(draw(st.lists(st.sampled_from(before.workers), max_size=2, unique=True)))
    holdings = {worker: held for worker, held in holdings.items() if worker not in dead}
    if draw(st.booleans()):
        return replaced(before, dead, {worker: worker for worker in dead}), holdings, rows
    try:
        return shrunk(before, dead), holdings, rows
    except InfeasibleError:
        return before, holdings, rows


def common_length(plan: Plan, holdings: Holdings, row: RowProgress) -> int:
    """The longest length that for every layer some live holder has."""
    held = [one for one in chain.from_iterable(holdings.values()) if one.row_id == row.row_id]
    lengths = [
        max((one.length for one in held if layer in one.layers), default=0) for layer in range(plan.model.num_layers)
    ]
    return min(row.num_cells, *lengths)


@settings(deadline=None, max_examples=200)
@given(case=cases())
def test_every_row_gets_exactly_one_restore_that_is_never_beyond_what_a_live_holder_has(
    case: tuple[Plan, Holdings, list[RowProgress]],
) -> None:
    plan, holdings, rows = case
    restores = restore_of(plan, holdings, rows)
    assert [restore.row_id for restore in restores] == [row.row_id for row in rows]
    for row, restore in zip(rows, restores, strict=True):
        if restore.tier == "replica":
            assert plan.recovery == "replica"
            assert restore.length == common_length(plan, holdings, row) >= 1
            assert restore.length + restore.replayed == row.num_cells
            assert restore.replayed <= max(4, (row.num_prompt + row.num_tokens) // 8)
        else:
            assert (restore.length, restore.fetches) == (0, ())
            assert restore.replayed == (row.num_tokens if restore.tier == "restart" else 0)
            assert plan.recovery in ("replica", restore.tier)


@settings(deadline=None, max_examples=200)
@given(case=cases())
def test_every_fetch_is_served_by_its_source_and_leaves_each_stage_with_all_of_its_layers(
    case: tuple[Plan, Holdings, list[RowProgress]],
) -> None:
    plan, holdings, rows = case
    for restore in restore_of(plan, holdings, rows):
        for fetch in restore.fetches:
            assert fetch.row_id == restore.row_id
            assert fetch.length == restore.length
            assert any(serves(held, restore, fetch.layers, fetch.is_copy) for held in holdings[fetch.source])
        for stage in plan.token_pipeline.stages if restore.tier == "replica" else ():
            came = [fetch for fetch in restore.fetches if fetch.target == stage.worker]
            has_all = any(
                held.row_id == restore.row_id
                and not held.is_copy
                and held.layers == stage.layers
                and held.length >= restore.length
                for held in holdings.get(stage.worker, ())
            )
            layers = [layer for fetch in came for layer in fetch.layers.indices]
            assert layers == ([] if has_all else list(stage.layers.indices))


def serves(held: HeldRow, restore: RowRestore, layers: LayerRange, is_copy: bool) -> bool:
    """One store of the source has all that is asked of it."""
    return (
        held.row_id == restore.row_id
        and held.is_copy == is_copy
        and held.layers.start <= layers.start
        and layers.stop <= held.layers.stop
        and held.length >= restore.length
    )


@settings(deadline=None, max_examples=150)
@given(case=cases())
def test_after_the_copies_are_made_again_every_holder_has_what_its_stage_was_restored_to(
    case: tuple[Plan, Holdings, list[RowProgress]],
) -> None:
    plan, holdings, rows = case
    restores = restore_of(plan, holdings, rows)
    again = {(copy.worker, copy.row_id): copy for copy in copies_again(plan, holdings, restores)}
    assert len(again) == len(copies_again(plan, holdings, restores))
    for restore in restores:
        for stage in plan.token_pipeline.stages:
            copy = again.pop((stage.worker, restore.row_id), None)
            holders = {holder.worker for holder in (*plan.successors_of(stage.worker), *plan.memory_stages)}
            if restore.tier != "replica" or not holders:
                assert copy is None
                continue
            start = restore.length if copy is None else copy.start
            assert copy is None or 0 <= copy.start < copy.stop == restore.length
            for holder in holders:
                lengths = [
                    held.length
                    for held in holdings.get(holder, ())
                    if held.row_id == restore.row_id and held.is_copy
                    if set(stage.layers.indices) <= set(held.layers.indices)
                ]
                assert max(lengths, default=0) >= start
    assert not again


@settings(deadline=None, max_examples=150)
@given(data=st.data(), depth=st.integers(2, 5), num_prompt=st.integers(1, 30), num_tokens=st.integers(1, 30))
def test_with_k_copies_any_k_workers_may_die_and_rows_go_on_from_the_oldest_copy(
    data: st.DataObject, depth: int, num_prompt: int, num_tokens: int
) -> None:
    declared = Declared(mode="colocated", colocated_depth=depth, prompt_rows=2, token_rows=2, scheduling="row")
    replication = data.draw(st.integers(1, depth - 1))
    plan = msgspec.structs.replace(place(declared, made_up_spec(), epoch=Epoch(1)), replication=replication)
    row = RowProgress(row_id=RowId(1), num_prompt=num_prompt, num_tokens=num_tokens)
    lag = data.draw(st.integers(0, min(4, num_tokens - 1)))
    dead = data.draw(st.lists(st.sampled_from(plan.workers), max_size=replication, unique=True))
    holdings: Holdings = {worker: [] for worker in plan.workers}
    for stage in plan.token_pipeline.stages:
        holdings[stage.worker].append(HeldRow(row.row_id, stage.layers, row.num_cells, False))
        for holder in plan.successors_of(stage.worker):
            holdings[holder.worker].append(HeldRow(row.row_id, stage.layers, row.num_cells - lag, True))
    live = {worker: held for worker, held in holdings.items() if worker not in dead}
    again = replaced(plan, dict.fromkeys(dead, IncarnationId("i")), {worker: worker for worker in dead})
    for after in (again, shrunk(plan, dict.fromkeys(dead))):
        (restore,) = restore_of(after, live, [row])
        assert restore.tier == "replica"
        assert restore.replayed == (lag if dead else 0)


@settings(deadline=None, max_examples=150)
@given(data=st.data(), plan=plans())
def test_a_plan_after_deaths_names_only_the_living_each_once_and_covers_every_layer(
    data: st.DataObject, plan: Plan
) -> None:
    everyone = (*plan.workers, *plan.standby)
    dead = dict.fromkeys(data.draw(st.lists(st.sampled_from(everyone), unique=True)), IncarnationId("i"))
    try:
        after = shrunk(plan, dead)
    except InfeasibleError:
        computing = set(plan.workers) - {stage.worker for stage in plan.memory_stages}
        assert computing | set(plan.standby) <= set(dead)
        return
    names = (*after.workers, *after.standby)
    assert len(set(names)) == len(names)
    assert not set(names) & set(dead)
    assert set(names) <= set(everyone)
    assert after.epoch == plan.epoch + 1
    assert after.replication <= after.token_pipeline.depth - 1
    assert (after.token_pipeline.in_flight, after.token_pipeline.microbatch_rows) == (
        plan.token_pipeline.in_flight,
        plan.token_pipeline.microbatch_rows,
    )
    for pipeline in (after.prompt_pipeline, after.token_pipeline):
        layers = [layer for stage in pipeline.stages for layer in stage.layers.indices]
        assert layers == list(range(plan.model.num_layers))
        assert [stage.index for stage in pipeline.stages] == list(range(pipeline.depth))
    assert {one.worker for one in after.fenced} == set(dead)
