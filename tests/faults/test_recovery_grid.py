"""Every stage killed at every moment, in every shape, with every number of copies: no request loses a token.

Half of the requests are greedy, half are sampled. All faults of one shape strike one cluster, one after the other; its
standbys are started again meanwhile. Minutes: run with ``-m grid``. The default run has test_recovery_ring.py and
test_recovery_split.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from dejavu.ids import RequestId, WorkerName
from dejavu.request import Request

from harness.cluster_kit import tokens_of
from harness.fault_relay import Several, kill, partition, stop
from harness.field import TTL_S, Field, field
from harness.judge import (
    AtEveryPhase,
    WhenCounted,
    assert_from_copies,
    assert_right,
    killing,
    token_stage,
)

pytestmark = [pytest.mark.grid, pytest.mark.faults, pytest.mark.timeout(600)]

MOMENTS = ("prompt", "handoff", 1, 14, "last", "during another repair")
MIDDLE = 14


@dataclass(frozen=True, slots=True)
class Shape:
    """A cluster's pipelines and its number of copies."""

    name: str
    words: tuple[str, ...]
    num_stages: int
    replication: int


def shapes() -> list[Shape]:
    """Colocated 3, and 1+2, 2+2, 1+3 prompt and token stages, each with 0, 1, 2 copies as far as the ring allows."""
    found = []
    for copies in (0, 1, 2):
        found.append(Shape(f"colocated3-k{copies}", ("strategy=colocated", "strategy.stages=3"), 3, copies))
    for prompt, token in ((1, 2), (2, 2), (1, 3)):
        words = (f"strategy.split.prompt={prompt}", f"strategy.split.token={token}")
        found += [Shape(f"{prompt}+{token}-k{copies}", words, prompt + token, copies) for copies in range(token)]
    return found


CASES = [
    pytest.param(shape, place, moment, id=f"{shape.name}-stage{place}-{str(moment).replace(' ', '-')}")
    for shape in shapes()
    for place in range(shape.num_stages)
    for moment in MOMENTS
]


@pytest.fixture(scope="module")
def battered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    """The cluster of one shape."""
    shape: Shape = request.param
    words = [*shape.words, f"strategy.replication={shape.replication}", "strategy.standby=2"]
    with field(tmp_path_factory.mktemp(shape.name), *words) as made:
        yield made


def victim_of(made: Field, place: int) -> WorkerName:
    """Who has the so many-th place of the plan in force."""
    return made.kit.plan_now.workers[place]


@pytest.mark.parametrize(("battered", "place", "moment"), CASES, indirect=["battered"], scope="module")
def test_worker_killed_at_any_moment_costs_no_token(battered: Field, place: int, moment: str | int) -> None:
    kit, victim = battered.kit, victim_of(battered, place)
    kit.wait_standbys()
    if moment == "last":
        num_tokens = sum(map(len, battered.expected.values()))
        watcher = WhenCounted(kit, num_tokens - 1, killing(kit, lambda: victim))
        served = kit.run(battered.requests, watcher=watcher, dead={victim})
        assert_right(served, battered.expected)
    elif moment == "during another repair":
        other = victim_of(battered, (place + 1) % len(kit.plan_now.workers))
        served = battered.suffer(kill(other, 5), kill(victim, "restore"))
    else:
        served = battered.suffer(kill(victim, moment))
    assert victim in {failure.worker for journal in served.journals for failure in journal.failures}
    assert len(kit.plan_now.workers) == len(kit.plan.workers)
    if moment == MIDDLE and kit.plan.replication:
        assert_from_copies(served)


RING = ["strategy=colocated", "strategy.stages=2", "strategy.replication=1"]


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    """Two stages without a standby: a new process takes a dead one's place."""
    with field(tmp_path_factory.mktemp("pair"), *RING) as made:
        yield made


def test_worker_killed_whenever_its_rows_were_restored_ends_the_requests_under_way_and_serves_the_others(
    pair: Field,
) -> None:
    """What kills its worker must not keep the others from being served; the pauses between the starts grow."""
    kit = pair.kit
    again = AtEveryPhase("restore", 3, killing(kit, lambda: token_stage(kit, 1)))
    first = WhenCounted(kit, 40, killing(kit, lambda: token_stage(kit, 1)))
    served = kit.run(pair.requests, watcher=Several([first, again]))
    tokens = tokens_of(served.completions)
    assert again.num_acted == 3
    assert tokens.keys() == pair.expected.keys()
    for request_id, completion in served.completions.items():
        whole = pair.expected[request_id]
        assert completion.tokens == whole[: len(completion.tokens)]
        if completion.finish_reason != "error":
            assert completion.tokens == whole
        else:
            assert "the cluster failed" in (completion.error or "")
    assert any(completion.finish_reason != "error" for completion in served.completions.values())


def test_worker_killed_while_its_successor_is_awaited_and_cut_off_ones_are_replaced(pair: Field) -> None:
    kit = pair.kit
    served = pair.suffer(kill(token_stage(kit, 0), 5), kill(token_stage(kit, 1), "replace"))
    assert len({failure.worker for journal in served.journals for failure in journal.failures}) == 2
    served = pair.suffer(partition(token_stage(kit, 1), 8, for_s=2.0 * TTL_S))
    assert {failure.cause for journal in served.journals for failure in journal.failures} <= {"lease", "link"}
    assert len(served.journals) >= 1


def test_frozen_worker_that_goes_on_after_its_ttl_is_replaced_or_was_never_missed(pair: Field) -> None:
    served = pair.suffer(stop(token_stage(pair.kit, 0), 6, for_s=1.6 * TTL_S))
    for journal in served.journals:
        assert {failure.cause for failure in journal.failures} <= {"lease", "link"}


def test_slots_that_are_used_again_at_once_hold_no_other_rows_cells_after_a_failure(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Field report B07, with replication as the late reader: many short rows in few places, a slow holder of copies."""
    words = ["strategy=colocated", "strategy.stages=3", "strategy.replication=1", "strategy.standby=3"]
    with field(tmp_path_factory.mktemp("slots"), *words, "strategy.in_flight=1") as made:
        kit = made.kit
        requests = [
            Request(id=RequestId(f"s{index}"), prompt_tokens=(3 + index % 90, 5, 8), max_tokens=1 + index % 4)
            for index in range(120)
        ]
        expected = tokens_of(kit.run(requests).completions)
        for round_index in range(3):
            kit.cluster.launcher.tell(token_stage(kit, 2), b'{"slow_s": 0.003}')
            served = kit.run(requests, kill(token_stage(kit, 1), 10 + 7 * round_index))
            assert_right(served, expected)
            kit.cluster.launcher.tell(token_stage(kit, 2), b'{"slow_s": 0}')
            kit.wait_standbys()
