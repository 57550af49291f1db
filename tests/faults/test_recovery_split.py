"""Workers of separate prompt and token pipelines that die cost no request a token (field reports B07 and B12).

One cluster suffers everything. Nobody is started anew in it: standbys take the places, and then the survivors.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.fault_relay import kill
from harness.field import Field, field
from harness.judge import WhenCounted, assert_right, killing, prompt_stage, token_stage

pytestmark = pytest.mark.faults

SPLIT = ["strategy.split.prompt=1", "strategy.split.token=2", "strategy.replication=1", "strategy.standby=2"]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    with field(tmp_path_factory.mktemp("split"), *SPLIT, "strategy.may_grow=false") as made:
        yield made


def test_prompt_worker_killed_after_rows_were_reserved_and_before_their_kv_is_replaced(split: Field) -> None:
    """The copies' readers wait for rows that never come, too."""
    victim = prompt_stage(split.kit, 0)
    served = split.suffer(kill(victim, "prompt"))
    assert served.journals[0].replaced_by.keys() == {victim}


def test_worker_killed_by_the_last_token_is_replaced_for_the_next_request(split: Field) -> None:
    kit, victim = split.kit, token_stage(split.kit, 1)
    last = WhenCounted(kit, sum(map(len, split.expected.values())) - 1, killing(kit, lambda: victim))
    served = kit.run(split.requests, watcher=last, dead={victim})
    assert last.has_acted
    assert_right(served, split.expected)
    assert set(served.journals[0].how.values()) == {"standby"}


def test_two_killed_at_the_handoff_and_during_the_restore_leave_one_worker_that_serves_all(split: Field) -> None:
    kit = split.kit
    victims = {token_stage(kit, 0), prompt_stage(kit, 0)}
    served = split.suffer(kill(token_stage(kit, 0), "handoff"), kill(prompt_stage(kit, 0), "restore"))
    assert {failure.worker for journal in served.journals for failure in journal.failures} == victims
    assert {how for journal in served.journals for how in journal.how.values()} == {"replan"}
    assert kit.plan_now.mode == "colocated"
