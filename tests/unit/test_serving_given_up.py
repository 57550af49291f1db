"""Requests that are given up while the cluster is repaired: what is said of the repair, and of those that go on."""

from __future__ import annotations

from dejavu.control.holdings import HeldRow
from dejavu.engine import messages as m
from dejavu.engine.mailbox import ClusterFenced, Event
from dejavu.ids import Epoch, RequestId, RowId
from dejavu.serving.source import Cancellation

from harness.epoch_stand import (
    FENCE,
    FIRST,
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

B = RowId(2)
BOTH = received(m.PromptTokens(epoch=Epoch(1), row_ids=(A, B), tokens=(7, 7)))


def held_by_w0(epoch: int) -> Event:
    """Its own cells of both rows, and the copies of w1's."""
    rows = [HeldRow(row, layers, 2, is_copy) for row in (A, B) for layers, is_copy in ((FIRST, False), (SECOND, True))]
    return holdings("w0", *rows, epoch=epoch)


def give_up(stand: Stand, name: str) -> None:
    ledger = stand.controller._ledger
    stand.controller._carry_out(ledger.cancel(Cancellation(request_id=RequestId(name)), stand.clock.now()))


def test_a_request_that_is_given_up_after_a_repair_is_no_first_token_after_it() -> None:
    """The pause was told as over when somebody had had enough of it."""

    def nobody_has_a_token() -> None:
        give_up(stand, "b")
        assert stand.receipts == []

    stand = Stand(PLAN, BOTH, *FENCE, held_by_w0(2), holdings("w1"), nobody_has_a_token, next_token(8, 1, epoch=2))
    stand.serve(request("a", 2), request("b", 4))
    assert (stand.lines["a"].tokens, stand.lines["b"].finish_reason) == ((7, 8), "abort")
    ((epoch, receipt),) = stand.receipts
    assert (epoch, receipt.resumed_s > receipt.restored_s) == (2, True)


def test_a_request_that_is_given_up_between_two_epochs_does_not_end_the_repair_of_the_first() -> None:
    """Those that went on had survived two repairs then, where there was one."""
    newer = later(PLAN, 3)
    stand = Stand(
        PLAN,
        BOTH, *FENCE, held_by_w0(2), holdings("w1"), ClusterFenced(plan=newer), lambda: give_up(stand, "b"),
        formed(newer), held_by_w0(3), holdings("w1", epoch=3), next_token(8, 1, epoch=3),
    )  # fmt: skip
    stand.serve(request("a", 2), request("b", 4))
    assert [epoch for epoch, _ in stand.receipts] == [3]
    assert (stand.lines["a"].tokens, stand.lines["a"].resumed) == ((7, 8), 1)


def test_requests_of_a_repair_that_are_all_given_up_between_two_epochs_end_no_repair() -> None:
    """The receipt of an epoch that was over was told, and its successor's repair counted as another one."""
    newer = later(PLAN, 3)

    def give_both_up() -> None:
        give_up(stand, "a")
        give_up(stand, "b")

    stand = Stand(
        PLAN,
        BOTH, *FENCE, held_by_w0(2), holdings("w1"), ClusterFenced(plan=newer), give_both_up,
        formed(newer), holdings("w0", epoch=3), holdings("w1", epoch=3), first_token(5, row_id=3, epoch=3),
    )  # fmt: skip
    stand.serve(request("a", 2), request("b", 4), request("c", 1))
    assert stand.lines["c"].tokens == (5,)
    assert [epoch for epoch, _ in stand.receipts] == [3]
