"""Stages of a ring that die, freeze, are cut off or slow cost no request a token (field reports B17, B18, B20, B34).

One cluster suffers everything. Nobody is started anew in it: standbys take the places, and then the survivors.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from dejavu.errors import DejavuError

from harness.cluster_kit import reference_tokens
from harness.fault_relay import kill, partition, slow, stop
from harness.field import TTL_S, Field, field
from harness.judge import assert_from_copies, assert_right, token_stage

pytestmark = pytest.mark.faults

RING = ["strategy=colocated", "strategy.stages=3", "strategy.replication=2", "strategy.standby=2"]


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    with field(tmp_path_factory.mktemp("ring"), *RING, "strategy.may_grow=false", is_sampled=False) as made:
        yield made


def test_tokens_without_a_fault_equal_generate(ring: Field) -> None:
    assert ring.expected == reference_tokens(ring.kit.folder, ring.requests)


def test_worker_frozen_for_half_a_ttl_or_cut_off_for_less_or_slow_is_not_declared_dead(ring: Field) -> None:
    """Field report B17."""
    served = ring.suffer(
        stop(token_stage(ring.kit, 1), 3, for_s=TTL_S / 2),
        partition(token_stage(ring.kit, 2), 8, for_s=TTL_S / 4),
        slow(token_stage(ring.kit, 0), "prompt", 0.002),
        slow(token_stage(ring.kit, 0), 12, 0.0),
    )
    assert served.journals == ()


def test_worker_killed_between_two_steps_is_replaced_and_rows_go_on_from_copies(ring: Field) -> None:
    """Field report B20."""
    served = ring.suffer(kill(token_stage(ring.kit, 1), 10))
    assert_from_copies(served)
    (journal,) = served.journals
    assert journal.receipt is not None
    assert sum(completion.resumed for completion in served.completions.values()) == sum(journal.receipt.rows.values())
    assert set(journal.how.values()) == {"standby"}


def test_worker_frozen_for_good_is_found_out_told_and_replaced_and_who_came_meanwhile_is_served(ring: Field) -> None:
    """Field reports B18 and B34."""
    kit, victim = ring.kit, token_stage(ring.kit, 0)
    num_before = len(ring.status.seen)
    spread = [msgspec.structs.replace(one, arrival_s=0.2 * place) for place, one in enumerate(ring.requests)]
    served = kit.run(spread, stop(victim, 5))
    assert_right(served, ring.expected)
    assert_from_copies(served)
    (failure,) = served.journals[0].failures
    assert (failure.worker, failure.cause) == (victim, "lease")
    assert failure.since_s is not None
    assert failure.seen_s >= failure.since_s
    seen = ring.status.wait_for(lambda seen: len(seen) > num_before + 1 and seen[-1]["Ready"].status, "ready again")
    repairing = [conditions for conditions in seen[num_before:] if conditions["Repairing"].status]
    assert repairing
    assert not any(conditions["Ready"].status for conditions in repairing)
    assert all(victim in conditions["Ready"].reason for conditions in repairing)


def test_two_of_three_killed_at_once_the_last_one_goes_on_from_its_two_copies_and_after_it_nobody(ring: Field) -> None:
    kit = ring.kit
    served = ring.suffer(kill(token_stage(kit, 0), 8), kill(token_stage(kit, 2), 8))
    assert_from_copies(served)
    assert {how for journal in served.journals for how in journal.how.values()} == {"replan"}
    assert kit.plan_now.token_pipeline.depth == 1
    last = token_stage(kit, 0)
    with pytest.raises(DejavuError, match=f"worker {last} died.*nobody can take its place"):
        kit.run(ring.requests, kill(last, 8))
