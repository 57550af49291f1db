"""What a restore decides, by example: tiers, lengths, who sends what, and which copies are made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from dejavu.control.holdings import CopyAgain, Fetch, HeldRow, RowProgress, RowRestore
from dejavu.control.placement import Declared, place
from dejavu.control.plan import Plan
from dejavu.control.recovery import copied_bytes, copies_again, restore_of, restored_bytes
from dejavu.control.replan import replaced, shrunk
from dejavu.ids import Epoch, RowId, WorkerName
from dejavu.kv.layout import LayerRange

from harness.plans import colocated_plan, made_up_spec, split_plan

ROW = RowId(7)
W0, W1, W2, W3 = (WorkerName(f"w{index}") for index in range(4))
PROMPT, TOKENS = 20, 5
CELLS = PROMPT + TOKENS - 1
THIRDS = (LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 6))
Holdings = dict[WorkerName, list[HeldRow]]


def ring_plan(depth: int = 3, *, replication: int = 1, **values: object) -> Plan:
    """A colocated plan of six layers whose stages hold copies for each other."""
    return msgspec.structs.replace(colocated_plan(depth), replication=replication, **values)


def progress(num_prompt: int = PROMPT, num_tokens: int = TOKENS, row_id: RowId = ROW) -> RowProgress:
    return RowProgress(row_id=row_id, num_prompt=num_prompt, num_tokens=num_tokens)


def held(layers: LayerRange, length: int, *, is_copy: bool = False, row_id: RowId = ROW) -> HeldRow:
    return HeldRow(row_id, layers, length, is_copy)


def all_hold(plan: Plan, length: int = CELLS, *, copied: int | None = None) -> Holdings:
    """Every stage's pool holds the row, and every successor its copy (``copied`` positions of it)."""
    stages = plan.token_pipeline.stages
    holdings: Holdings = {stage.worker: [held(stage.layers, length)] for stage in stages}
    for stage in stages:
        for holder in plan.successors_of(stage.worker):
            holdings[holder.worker].append(held(stage.layers, length if copied is None else copied, is_copy=True))
    return holdings


def without(holdings: Holdings, *dead: WorkerName) -> Holdings:
    return {worker: rows for worker, rows in holdings.items() if worker not in dead}


def only(plan: Plan, holdings: Mapping[WorkerName, Sequence[HeldRow]], row: RowProgress) -> RowRestore:
    (restore,) = restore_of(plan, holdings, [row])
    return restore


def fetch(
    source: WorkerName, target: WorkerName, layers: LayerRange, *, length: int = CELLS, is_copy: bool = True
) -> Fetch:
    return Fetch(row_id=ROW, source=source, is_copy=is_copy, target=target, layers=layers, length=length)


@pytest.mark.parametrize(("index", "holder"), [(0, W1), (1, W2), (2, W0)])
def test_a_stage_that_died_fetches_its_rows_from_its_successor_and_no_other_stage_fetches(
    index: int, holder: WorkerName
) -> None:
    plan = ring_plan()
    dead = plan.token_pipeline.stages[index].worker
    restore = only(plan, without(all_hold(plan), dead), progress())
    assert restore == RowRestore(
        row_id=ROW, tier="replica", length=CELLS, replayed=0, fetches=(fetch(holder, dead, THIRDS[index]),)
    )


def test_a_standby_in_the_dead_ones_place_is_the_target() -> None:
    plan = ring_plan(standby=(W3,))
    after = replaced(plan, {W1: None}, {W1: W3})
    restore = only(after, {**without(all_hold(plan), W1), W3: []}, progress())
    assert restore.fetches == (fetch(W2, W3, THIRDS[1]),)


def test_a_row_goes_on_from_where_the_copy_ends_and_replays_the_tokens_after_it() -> None:
    plan = ring_plan()
    restore = only(plan, without(all_hold(plan, copied=CELLS - 3), W1), progress())
    assert (restore.tier, restore.length, restore.replayed) == ("replica", CELLS - 3, 3)
    assert restore.fetches == (fetch(W2, W1, THIRDS[1], length=CELLS - 3),)


def test_a_pool_that_is_ahead_of_what_the_next_step_needs_counts_up_to_it() -> None:
    plan = ring_plan()
    restore = only(plan, all_hold(plan, CELLS + 1), progress())
    assert restore == RowRestore(row_id=ROW, tier="replica", length=CELLS, replayed=0)


def test_neighbours_that_die_together_are_restored_when_two_successors_hold_copies() -> None:
    plan = ring_plan(replication=2)
    restore = only(plan, without(all_hold(plan), W1, W2), progress())
    assert restore.fetches == (fetch(W0, W1, THIRDS[1]), fetch(W0, W2, THIRDS[2]))


def test_the_holder_that_died_with_its_stage_leaves_a_row_to_be_recomputed() -> None:
    plan = ring_plan()
    restore = only(plan, without(all_hold(plan), W1, W2), progress())
    assert restore == RowRestore(row_id=ROW, tier="recompute", length=0, replayed=0)


@pytest.mark.parametrize("depth", [1, 3])
def test_without_any_holder_a_row_is_recomputed(depth: int) -> None:
    assert only(ring_plan(depth, replication=0), {}, progress()).tier == "recompute"


@pytest.mark.parametrize(
    ("recovery", "restore"),
    [
        ("restart", RowRestore(row_id=ROW, tier="restart", length=0, replayed=TOKENS)),
        ("recompute", RowRestore(row_id=ROW, tier="recompute", length=0, replayed=0)),
    ],
)
def test_a_lower_tier_that_the_user_chose_is_taken_although_every_cell_is_there(
    recovery: str, restore: RowRestore
) -> None:
    plan = ring_plan(recovery=recovery)
    assert only(plan, all_hold(plan), progress()) == restore


@pytest.mark.parametrize(("missing", "tier"), [(0, "replica"), (1, "replica"), (2, "recompute")])
def test_the_prompts_last_cell_may_be_missing_and_no_more_of_the_prompt(missing: int, tier: str) -> None:
    plan = ring_plan()
    assert only(plan, all_hold(plan, PROMPT - missing), progress(num_tokens=1)).tier == tier


@pytest.mark.parametrize(
    ("num_tokens", "behind", "tier"),
    [(10, 4, "replica"), (10, 5, "recompute"), (60, 10, "replica"), (60, 11, "recompute")],
)
def test_a_row_is_replayed_up_to_four_steps_or_an_eighth_of_it_and_else_recomputed(
    num_tokens: int, behind: int, tier: str
) -> None:
    plan = ring_plan()
    length = PROMPT + num_tokens - 1 - behind
    restore = only(plan, all_hold(plan, length), progress(num_tokens=num_tokens))
    assert restore.tier == tier
    assert restore.replayed == (behind if tier == "replica" else 0)


def test_a_row_without_a_token_goes_on_from_its_prompt_all_but_the_last_position() -> None:
    plan = ring_plan()
    restore = only(plan, without(all_hold(plan, PROMPT), W1), progress(num_tokens=0))
    assert restore == RowRestore(
        row_id=ROW,
        tier="replica",
        length=PROMPT - 1,
        replayed=0,
        fetches=(fetch(W2, W1, THIRDS[1], length=PROMPT - 1),),
    )


def test_a_row_without_a_token_whose_prompt_was_under_way_is_recomputed() -> None:
    plan = ring_plan()
    assert only(plan, all_hold(plan, PROMPT // 2), progress(num_tokens=0)).tier == "recompute"


@pytest.mark.parametrize(("num_tokens", "tier"), [(0, "recompute"), (1, "replica"), (2, "replica")])
def test_a_prompt_of_one_token_is_restored_once_its_cell_is_there(num_tokens: int, tier: str) -> None:
    plan = ring_plan()
    row = progress(num_prompt=1, num_tokens=num_tokens)
    restore = only(plan, all_hold(plan, 1), row)
    assert (restore.tier, restore.replayed) == (tier, max(0, num_tokens - 1))


def test_a_prompt_of_one_token_of_which_no_cell_is_held_is_recomputed() -> None:
    plan = ring_plan()
    assert only(plan, without(all_hold(plan, 1, copied=0), W1), progress(num_prompt=1, num_tokens=1)).tier == (
        "recompute"
    )


def test_prompt_stages_that_still_hold_a_row_serve_the_token_stage_that_died() -> None:
    plan = split_plan(1, 2)
    halves = [stage.layers for stage in plan.token_pipeline.stages]
    holdings = {W0: [held(LayerRange(0, 6), PROMPT)], W1: [held(halves[0], PROMPT)]}
    restore = only(plan, holdings, progress(num_tokens=1))
    assert restore.fetches == (fetch(W0, W2, halves[1], length=PROMPT, is_copy=False),)


def test_a_pool_is_read_rather_than_a_copy() -> None:
    plan = ring_plan(2, replication=0)
    halves = [stage.layers for stage in plan.token_pipeline.stages]
    holdings = {
        W0: [held(halves[0], CELLS), held(halves[1], CELLS, is_copy=True)],
        W2: [held(halves[1], CELLS)],
    }
    assert only(plan, holdings, progress()).fetches == (fetch(W2, W1, halves[1], is_copy=False),)


def test_of_two_copies_the_one_that_serves_most_of_the_stage_is_read() -> None:
    plan = ring_plan(2, replication=0)
    lower, upper = (stage.layers for stage in plan.token_pipeline.stages)
    holdings = {
        W0: [held(lower, CELLS), held(LayerRange(upper.start, upper.start + 1), CELLS, is_copy=True)],
        W2: [held(upper, CELLS, is_copy=True)],
    }
    assert only(plan, holdings, progress()).fetches == (fetch(W2, W1, upper),)


def test_a_source_that_is_too_short_is_passed_over_for_one_that_is_long_enough() -> None:
    plan = ring_plan(2, replication=0)
    lower, upper = (stage.layers for stage in plan.token_pipeline.stages)
    holdings = {
        W0: [held(lower, CELLS), held(upper, CELLS, is_copy=True)],
        W1: [held(upper, CELLS - 1)],
    }
    assert only(plan, holdings, progress()).fetches == (fetch(W0, W1, upper),)


def test_pools_cut_anew_take_what_they_have_from_themselves_and_the_rest_from_copies() -> None:
    plan = ring_plan()
    after = shrunk(plan, {W1: None})
    assert [stage.layers for stage in after.token_pipeline.stages] == [LayerRange(0, 3), LayerRange(3, 6)]
    restore = only(after, without(all_hold(plan), W1), progress())
    assert restore.fetches == (
        fetch(W0, W0, LayerRange(0, 2), is_copy=False),
        fetch(W2, W0, LayerRange(2, 3)),
        # Of its own layers the worker holds a copy of what its dead predecessor had.
        fetch(W2, W2, LayerRange(3, 4)),
        fetch(W2, W2, LayerRange(4, 6), is_copy=False),
    )


def test_a_row_of_a_disaggregated_cluster_whose_prompt_stage_died_needs_no_fetch() -> None:
    plan = msgspec.structs.replace(split_plan(1, 2), replication=1)
    restore = only(plan, all_hold(plan), progress())
    assert restore == RowRestore(row_id=ROW, tier="replica", length=CELLS, replayed=0)


def test_overlapping_doubled_and_foreign_holdings_change_nothing() -> None:
    plan = ring_plan()
    plain = without(all_hold(plan), W1)
    noisy = {
        worker: [*rows, *rows, held(LayerRange(0, 6), 3, is_copy=True), held(THIRDS[1], 99, row_id=RowId(1))]
        for worker, rows in plain.items()
    }
    assert restore_of(plan, noisy, [progress()]) == restore_of(plan, plain, [progress()])


def test_each_row_is_decided_by_itself_and_in_order() -> None:
    plan = ring_plan()
    rows = [progress(row_id=RowId(1)), progress(row_id=RowId(2)), progress(row_id=RowId(3), num_tokens=0)]
    holdings = {stage.worker: [held(stage.layers, CELLS, row_id=RowId(2))] for stage in plan.token_pipeline.stages}
    restores = restore_of(plan, holdings, rows)
    assert [(restore.row_id, restore.tier) for restore in restores] == [
        (1, "recompute"),
        (2, "replica"),
        (3, "recompute"),
    ]


def test_the_copies_that_died_with_a_holder_are_made_again_and_no_others() -> None:
    plan = ring_plan()
    holdings = without(all_hold(plan), W1)
    restores = restore_of(plan, holdings, [progress()])
    # W1 held the copy of W0's rows; what W1 itself fetches is still copied at W2.
    assert copies_again(plan, holdings, restores) == (CopyAgain(worker=W0, row_id=ROW, start=0, stop=CELLS),)


def test_the_worst_holder_decides_what_is_copied_again() -> None:
    plan = ring_plan(replication=2)
    holdings = all_hold(plan)
    holdings[W2] = [held(THIRDS[2], CELLS), held(THIRDS[1], CELLS, is_copy=True), held(THIRDS[0], 9, is_copy=True)]
    restores = restore_of(plan, holdings, [progress()])
    assert copies_again(plan, holdings, restores) == (CopyAgain(worker=W0, row_id=ROW, start=9, stop=CELLS),)


def test_a_copy_cut_for_other_layers_does_not_count_and_a_wider_one_does() -> None:
    plan = ring_plan(2)
    lower, upper = (stage.layers for stage in plan.token_pipeline.stages)
    holdings = {
        W0: [held(lower, CELLS), held(LayerRange(upper.start, upper.stop - 1), CELLS, is_copy=True)],
        W1: [held(upper, CELLS), held(LayerRange(0, 6), CELLS, is_copy=True)],
    }
    restores = restore_of(plan, holdings, [progress()])
    assert copies_again(plan, holdings, restores) == (CopyAgain(worker=W1, row_id=ROW, start=0, stop=CELLS),)


def test_a_memory_stage_is_one_more_holder() -> None:
    declared = Declared(
        mode="colocated", colocated_depth=2, prompt_rows=2, token_rows=2, scheduling="row", stream_to="memory"
    )
    plan = place(declared, made_up_spec(), epoch=Epoch(1))
    holdings = all_hold(plan)
    restores = restore_of(plan, holdings, [progress()])
    again = copies_again(plan, holdings, restores)
    assert [(copy.worker, copy.start, copy.stop) for copy in again] == [(W0, 0, CELLS), (W1, 0, CELLS)]
    holdings[W2] = [held(LayerRange(0, 6), CELLS, is_copy=True)]
    assert copies_again(plan, holdings, restores) == ()


@pytest.mark.parametrize("recovery", ["recompute", "restart"])
def test_rows_that_are_made_again_are_not_copied_again(recovery: str) -> None:
    plan = ring_plan(recovery=recovery)
    assert copies_again(plan, {}, restore_of(plan, {}, [progress()])) == ()


def test_without_replication_nothing_is_copied_again() -> None:
    plan = ring_plan(replication=0)
    holdings = all_hold(plan)
    assert copies_again(plan, holdings, restore_of(plan, holdings, [progress()])) == ()


def test_bytes_count_keys_and_values_of_every_layer_position_and_holder() -> None:
    plan = ring_plan(replication=2)
    position_bytes = 2 * 2 * 8 * 4
    holdings = without(all_hold(plan), W1)
    restores = restore_of(plan, holdings, [progress()])
    again = copies_again(plan, holdings, restores)
    assert restored_bytes(plan, restores) == 2 * CELLS * position_bytes
    assert [copy.worker for copy in again] == [W0, W2]
    assert copied_bytes(plan, again) == 2 * (2 * CELLS * position_bytes) * 2
