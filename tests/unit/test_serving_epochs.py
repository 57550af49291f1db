"""The controller from one epoch into the next: what it sends, admits, releases and reports, and what interrupts it."""

from __future__ import annotations

import msgspec
import pytest

from dejavu.control.holdings import HeldRow
from dejavu.control.plan import Fenced
from dejavu.engine import messages as m
from dejavu.engine.mailbox import ClusterFenced, Event, PeerLost
from dejavu.ids import Epoch, IncarnationId, RowId, WorkerName

from harness.epoch_stand import (
    FENCE,
    FIRST,
    NEXT,
    PLAN,
    SECOND,
    A,
    first_token,
    formed,
    holdings,
    later,
    next_token,
    received,
    request,
)
from harness.epoch_stand import EpochStand as Stand
from harness.plans import split_plan


def test_a_row_goes_on_from_a_copy_and_its_stages_are_told_in_an_order_that_fits() -> None:
    """w1 died; w0 has the row's own cells, and a copy of w1's."""
    stand = Stand(
        PLAN,
        first_token(7), next_token(8, 1), *FENCE,
        holdings("w0", HeldRow(A, FIRST, 3, False), HeldRow(A, SECOND, 3, True)), holdings("w1"),
        next_token(9, 2, epoch=2), next_token(6, 3, epoch=2),
    )  # fmt: skip
    stand.serve(request())
    assert stand.lines["r"].tokens == (7, 8, 9, 6)
    assert stand.lines["r"].resumed == 1
    ((_, restore_0), (_, restore_1)) = stand.since(2, m.RestoreRows)
    assert isinstance(restore_0, m.RestoreRows)
    assert isinstance(restore_1, m.RestoreRows)
    assert [row.is_here for row in (*restore_0.rows, *restore_1.rows)] == [True, False]
    assert (restore_0.copies, restore_1.copies) == ((m.CopySpan(A, 0, 3),), ())
    ((source, sends),) = stand.since(2, m.SendRows)
    assert (source, sends) == (
        "w0",
        m.SendRows(epoch=Epoch(2), parts=(m.SendPart(A, SECOND, 3, True, WorkerName("w1")),)),
    )
    ((_, admit),) = stand.since(2, m.AdmitRows)
    assert isinstance(admit, m.AdmitRows)
    (row,) = admit.rows
    assert (row.position, row.token, row.num_generated, row.ready_stages, row.known) == (3, 8, 2, 2, ())
    assert admit.steps == {0: 1}
    assert stand.phases == ["began", "prompt", "handoff", "fence", "replace", "restore", "resume"]


def test_a_row_survives_a_death_that_came_while_the_declared_state_was_changed() -> None:
    """The repair used to be taken for the change, and the row's line did not tell of it."""
    fenced = (Fenced(worker=WorkerName("w1"), incarnation=IncarnationId("i")),)
    changed, repaired = msgspec.structs.replace(NEXT, revision=2), msgspec.structs.replace(later(PLAN, 3), revision=2)
    repaired = msgspec.structs.replace(repaired, fenced=fenced)
    for after, num_survived in ((changed, 0), (repaired, 1)):
        epoch = after.epoch
        stand = Stand(
            PLAN,
            first_token(7), next_token(8, 1), ClusterFenced(plan=changed), ClusterFenced(plan=after), formed(after),
            holdings("w0", HeldRow(A, FIRST, 3, False), HeldRow(A, SECOND, 3, True), epoch=epoch),
            holdings("w1", epoch=epoch), next_token(9, 2, epoch=epoch), next_token(6, 3, epoch=epoch),
        )  # fmt: skip
        stand.serve(request())
        assert (stand.lines["r"].tokens, stand.lines["r"].resumed) == ((7, 8, 9, 6), num_survived)


def test_a_lost_link_is_told_until_the_next_epoch() -> None:
    """A worker that died while the store was away left the service ready: nobody was fenced."""
    seen: list[tuple[str, ...]] = []

    def look() -> None:
        seen.append(stand.controller.standing.lost)

    w0_says = received(m.LinkLost(epoch=Epoch(1), peer="w1", reason="reset"))
    old = PeerLost(peer="w0", reason="closed", epoch=Epoch(0))
    stand = Stand(
        PLAN,
        first_token(7), look, old, look, PeerLost(peer="w1", reason="reset", epoch=Epoch(1)), w0_says, look, *FENCE,
        holdings("w0"), holdings("w1"), look, first_token(9, epoch=2),
    )  # fmt: skip
    stand.serve(request(max_tokens=2))
    assert seen == [(), (), ("w1",), ()]


def test_a_receipt_says_what_was_done_and_when_the_first_token_came() -> None:
    stand = Stand(
        PLAN,
        first_token(7), next_token(8, 1), *FENCE,
        holdings("w0", HeldRow(A, FIRST, 3, False), HeldRow(A, SECOND, 2, True)), holdings("w1"),
        next_token(8, 1, epoch=2), next_token(9, 2, epoch=2), next_token(6, 3, epoch=2),
    )  # fmt: skip
    stand.serve(request())
    assert stand.lines["r"].tokens == (7, 8, 9, 6), "the token that was made again is not given out twice"
    ((epoch, receipt),) = stand.receipts
    assert (epoch, receipt.rows, receipt.steps_recomputed, receipt.resume_steps) == (2, {"replica": 1}, {0: 1}, {0: 0})
    assert receipt.resumed_s > receipt.restored_s
    assert receipt.bytes_restored == 3 * 2 * PLAN.model.layout.position_bytes
    assert {worker for worker, _ in stand.since(2, m.ForgetSources)} == {"w0", "w1"}


def test_a_row_of_which_too_little_is_left_has_its_prompt_run_with_its_tokens() -> None:
    stand = Stand(
        PLAN,
        first_token(7), next_token(8, 1), *FENCE, holdings("w0", HeldRow(A, FIRST, 3, False)), holdings("w1"),
        first_token(9, epoch=2), next_token(6, 2, epoch=2),
    )  # fmt: skip
    stand.serve(request())
    assert stand.lines["r"].tokens == (7, 8, 9, 6)
    ((_, run),) = stand.since(2, m.RunPrompt)
    assert isinstance(run, m.RunPrompt)
    assert [(row.row_id, row.length) for row in run.rows] == [(A, 4)]
    assert stand.receipts[0][1].rows == {"recompute": 1}


def test_nothing_is_sent_between_two_epochs_and_old_links_go_when_the_new_ones_are_there() -> None:
    newer = later(PLAN, 3)

    def quiet() -> None:
        assert [message for _, message in stand.told if message.epoch > 1] == []
        assert stand.num_aborts == 0, "a worker still in the old epoch would take the controller for dead"

    stand = Stand(
        PLAN,
        first_token(7), ClusterFenced(plan=NEXT), next_token(8, 1), quiet, ClusterFenced(plan=newer), quiet,
        formed(newer), holdings("w0", epoch=3), holdings("w1", epoch=3), first_token(9, epoch=3),
    )  # fmt: skip
    stand.serve(request(max_tokens=3))
    assert (stand.num_aborts, stand.lines["r"].tokens) == (1, (7, 8, 9))


def test_a_row_that_ended_between_two_epochs_is_let_go_in_the_next() -> None:
    stand = Stand(
        PLAN,
        first_token(7), ClusterFenced(plan=NEXT), next_token(8, 1), formed(NEXT),
        holdings("w0", HeldRow(A, FIRST, 3, False), HeldRow(RowId(2), FIRST, 2, False)), holdings("w1"),
        first_token(5, row_id=2, epoch=2),
    )  # fmt: skip
    stand.serve(request("a", 2), request("b", 1))
    assert (stand.lines["a"].tokens, stand.lines["b"].tokens) == ((7, 8), (5,))
    released = [(name, one.row_ids) for name, one in stand.since(2, m.ReleaseRows) if isinstance(one, m.ReleaseRows)]
    assert ("w0", (A,)) in released
    assert ("w1", (A,)) in released


def test_an_epoch_that_ends_while_it_is_restored_is_begun_anew_in_the_next() -> None:
    newer = later(PLAN, 3)
    held = (HeldRow(A, FIRST, 2, False), HeldRow(A, SECOND, 2, True))
    stand = Stand(
        PLAN,
        first_token(7), *FENCE, holdings("w0", *held), ClusterFenced(plan=newer), formed(newer),
        holdings("w0", *held, epoch=3), holdings("w1", epoch=3), next_token(8, 1, epoch=3),
    )  # fmt: skip
    stand.serve(request(max_tokens=2))
    assert stand.lines["r"].tokens == (7, 8)
    assert [epoch for epoch, _ in stand.receipts] == [3]
    assert (stand.since(2, m.AdmitRows), len(stand.since(3, m.AdmitRows))) == ([], 1)


def test_a_fence_that_is_heard_after_its_own_epoch_has_begun_does_not_interrupt_it() -> None:
    """It was put back behind the news that the epoch had formed, and then taken for that of yet another one."""
    newer = later(PLAN, 3)
    stand = Stand(PLAN, first_token(7), *FENCE, ClusterFenced(plan=newer), formed(newer))
    stand.answers = lambda worker, message: holdings(worker, epoch=3) if message.epoch == 3 else None
    stand.then = [first_token(8, epoch=3)]
    stand.serve(request(max_tokens=2))
    assert stand.lines["r"].tokens == (7, 8)
    assert [epoch for epoch, _ in stand.receipts] == [3]


def test_a_worker_that_does_not_say_what_it_holds_is_suspected_and_another_epoch_is_waited_for() -> None:
    newer = later(PLAN, 3)
    lost = PeerLost(peer="w1", reason="reset", epoch=Epoch(2))
    stand = Stand(
        PLAN,
        first_token(7), *FENCE, lost, ClusterFenced(plan=newer), formed(newer),
        holdings("w0", HeldRow(A, FIRST, 2, False), HeldRow(A, SECOND, 2, True), epoch=3), holdings("w1", epoch=3),
        next_token(8, 1, epoch=3),
    )  # fmt: skip
    stand.serve(request(max_tokens=2))
    assert stand.lines["r"].tokens == (7, 8)
    assert ("w1", Epoch(2)) in stand.suspected


def test_a_worker_that_cannot_be_linked_to_is_suspected_in_the_new_epoch() -> None:
    newer = later(PLAN, 3)
    stand = Stand(
        PLAN,
        *FENCE, ClusterFenced(plan=newer), formed(newer), holdings("w0", epoch=3), holdings("w1", epoch=3),
        first_token(7, epoch=3),
    )  # fmt: skip
    stand.unreachable = {Epoch(2)}
    stand.serve(request(max_tokens=1))
    assert (stand.suspected, stand.lines["r"].tokens) == ([("w1", Epoch(2))], (7,))


def test_an_old_plan_or_one_that_has_formed_before_changes_nothing() -> None:
    stand = Stand(PLAN, ClusterFenced(plan=PLAN), formed(PLAN), first_token(7))
    stand.serve(request(max_tokens=1))
    assert (stand.num_aborts, stand.phases.count("restore"), stand.lines["r"].tokens) == (0, 0, (7,))


def test_a_given_back_row_whose_last_token_is_missing_goes_on_in_the_next_epoch() -> None:
    """Stage 0 said that the row had ended before the last stage's token came, and then that stage died."""
    stand = Stand(
        PLAN,
        first_token(7), received(m.RowsEnded(epoch=Epoch(1), row_ids=(A,))), *FENCE,
        holdings("w0", HeldRow(A, FIRST, 3, False), HeldRow(A, SECOND, 3, True)), holdings("w1"),
        next_token(8, 1, epoch=2), received(m.RowsEnded(epoch=Epoch(2), row_ids=(A,))),
    )  # fmt: skip
    stand.serve(request(max_tokens=2))
    assert stand.lines["r"].tokens == (7, 8)
    ((_, admit),) = stand.since(2, m.AdmitRows)
    assert isinstance(admit, m.AdmitRows)
    assert [(row.position, row.token) for row in admit.rows] == [(2, 7)]


def test_requests_under_way_in_five_failures_without_a_token_end_and_the_others_go_on() -> None:
    rounds: list[Event] = []
    for epoch in range(2, 8):
        plan = later(PLAN, epoch)
        rounds += [ClusterFenced(plan=plan), formed(plan), holdings("w0", epoch=epoch), holdings("w1", epoch=epoch)]
    stand = Stand(PLAN, *rounds, first_token(5, row_id=2, epoch=7))
    stand.serve(request("a"))
    line = stand.lines["a"]
    assert (line.finish_reason, line.resumed) == ("error", 1)
    assert "failed 5 times in a row" in str(line.error)


@pytest.mark.parametrize("recovery", ["recompute", "restart"])
def test_the_declared_tier_bounds_what_a_restore_uses(recovery: str) -> None:
    plan = msgspec.structs.replace(PLAN, recovery=recovery)
    held = (HeldRow(A, FIRST, 3, False), HeldRow(A, SECOND, 3, True))
    tokens = [first_token(9, epoch=2)] if recovery == "recompute" else [
        first_token(7, epoch=2), next_token(8, 1, epoch=2), next_token(9, 2, epoch=2)
    ]  # fmt: skip
    following = later(plan, 2)
    stand = Stand(
        plan,
        first_token(7), next_token(8, 1), ClusterFenced(plan=following), formed(following),
        holdings("w0", *held), holdings("w1"), *tokens,
    )  # fmt: skip
    stand.serve(request(max_tokens=3))
    assert stand.lines["r"].tokens == (7, 8, 9)
    assert stand.receipts[0][1].rows == {recovery: 1}


def test_only_token_stages_are_asked_what_they_hold() -> None:
    plan = split_plan(2, 2, in_flight=1)
    following = later(plan, 2)
    stand = Stand(
        plan,
        ClusterFenced(plan=following), formed(following), holdings("w2"), holdings("w3"),
        first_token(7, epoch=2),
    )  # fmt: skip
    stand.serve(request(max_tokens=1))
    assert {name for name, _ in stand.since(2, m.AskHoldings)} == {"w2", "w3"}
    assert {name for name, _ in stand.since(2, m.ExpectRows)} == {"w2", "w3"}
