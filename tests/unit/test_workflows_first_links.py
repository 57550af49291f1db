"""The controller's first links, where a death or a change of the declaration comes between serving and linking."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from dejavu.clock import VirtualClock
from dejavu.control.journal import RestoreReceipt
from dejavu.control.plan import Plan
from dejavu.errors import DejavuError
from dejavu.ids import Epoch, WorkerName
from dejavu.serving.cluster_links import ClusterLinks
from dejavu.transport.base import LinkRefused
from dejavu.workflows.first_links import Formed, link_first

from harness.plans import colocated_plan

PLAN = colocated_plan(2)
LATER = msgspec.structs.replace(PLAN, epoch=Epoch(2))
ADDRESSES = {WorkerName("w0"): "a:1", WorkerName("w1"): "a:2"}


class MadeUpCluster:
    """Workers that take the links of one epoch alone; the next one forms when somebody is suspected."""

    def __init__(self, in_force: Plan) -> None:
        self.in_force = in_force
        self.formed: Formed = (PLAN, ADDRESSES)
        self.linked: list[int] = []
        self.suspected: list[tuple[str, int]] = []
        self.receipts: list[int] = []
        self.reason: str | None = None
        self.forms_next = True

    def why_failed(self) -> str | None:
        return self.reason

    def link(self, plan: Plan, addresses: Mapping[WorkerName, str]) -> ClusterLinks:
        if plan.epoch != self.in_force.epoch:
            raise LinkRefused(f"epoch {plan.epoch} is not in force here", peer="w1", address="a:2", phase="connect")
        self.linked.append(plan.epoch)
        return None  # type: ignore[return-value]

    def suspect(self, worker: str, epoch: Epoch, reason: str) -> None:
        self.suspected.append((worker, epoch))
        if self.forms_next:
            self.formed = (self.in_force, ADDRESSES)

    def resumed(self, epoch: Epoch, receipt: RestoreReceipt) -> None:
        self.receipts.append(epoch)


def link(made: MadeUpCluster) -> None:
    link_first(lambda: made.formed, made, VirtualClock(), timeout_s=30.0)


def test_the_first_epoch_is_linked_to_where_nothing_has_happened() -> None:
    made = MadeUpCluster(PLAN)
    link(made)
    assert (made.linked, made.suspected, made.receipts) == ([1], [], [])


def test_an_epoch_that_is_over_before_it_is_linked_to_is_followed_by_the_next_one() -> None:
    """A wish that was in the store before the cluster served used to end the run with "epoch 1 is not in force here";
    what led to the next epoch is told as done, or no other change would ever be taken up."""
    made = MadeUpCluster(LATER)
    link(made)
    assert (made.linked, made.suspected, made.receipts) == ([2], [("w1", 1)], [2])


def test_a_cluster_that_fails_meanwhile_ends_the_wait_with_its_reason() -> None:
    made = MadeUpCluster(LATER)
    made.forms_next, made.reason = False, "nobody can take its place"
    with pytest.raises(DejavuError, match="nobody can take its place"):
        link(made)


def test_an_epoch_that_never_comes_ends_the_wait_with_what_was_wrong_with_the_last_one() -> None:
    made = MadeUpCluster(LATER)
    made.forms_next = False
    with pytest.raises(LinkRefused, match="epoch 1 is not in force here"):
        link(made)
