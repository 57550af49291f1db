"""Ways to use machines, and the guess at which is best."""

from __future__ import annotations

import pytest

from dejavu.sim.arrangements import Arrangement, arrangements, guessed_s
from dejavu.sim.simulation import Setting, simulate

from harness.sim_kit import asked, costs, sim_plan


def test_a_baseline_is_one_pipeline_of_all_machines() -> None:
    assert arrangements("baseline", 4, [8, 16], 64) == [Arrangement(rows=8, depth=4), Arrangement(rows=16, depth=4)]


def test_data_parallelism_uses_every_number_of_equal_pipelines() -> None:
    found = arrangements("baseline_dp", 12, [8], 64)

    assert [one.label for one in found] == ["2 × 6", "3 × 4", "4 × 3", "6 × 2", "12 × 1"]
    assert {one.num_machines for one in found} == {12}


def test_disaggregation_uses_every_split() -> None:
    found = arrangements("disaggregated", 4, [8], 64)

    assert [one.label for one in found] == ["1 + 3", "2 + 2", "3 + 1"]
    assert {one.num_machines for one in found} == {4}


@pytest.mark.parametrize("case", ["baseline_dp", "disaggregated"])
def test_one_machine_cannot_be_shared_out(case: str) -> None:
    assert arrangements(case, 1, [8], 64) == []  # type: ignore[arg-type]


def test_a_pipeline_has_no_more_stages_than_layers() -> None:
    assert arrangements("baseline", 8, [1], 4) == []
    assert [one.label for one in arrangements("baseline_dp", 8, [1], 4)] == ["2 × 4", "4 × 2", "8 × 1"]


def test_prompts_may_run_ahead_as_far_as_rows_fit() -> None:
    assert Arrangement(rows=1, split=(2, 3)).in_flights == (6, 5, 4, 3)
    assert Arrangement(rows=1, depth=4).in_flights == (4,)


@pytest.mark.parametrize(
    ("one", "plan"),
    [
        (Arrangement(rows=1, depth=4), sim_plan("colocated")),
        (Arrangement(rows=1, split=(1, 3)), sim_plan("disaggregated", split=(1, 3), in_flight=9)),
    ],
    ids=["colocated", "disaggregated"],
)
def test_the_guess_is_near_what_is_simulated(one: Arrangement, plan: object) -> None:
    requests, profile = asked([30, 12, 44, 8, 61, 20, 33, 5, 27]), costs(0.4, 0.04)

    guess_s = guessed_s(one, requests, profile, overhead=1.0, handover_s=0.0)

    result = simulate(Setting(plan=plan, costs=profile), requests)  # type: ignore[arg-type]
    assert guess_s == pytest.approx(result.makespan_s, rel=0.1)


def test_few_rows_make_the_guess_longer() -> None:
    one, requests, profile = Arrangement(rows=1, split=(1, 3)), asked([30, 12, 44, 8, 61]), costs(0.4, 0.04)

    guess_s = guessed_s(one, requests, profile, overhead=1.0, handover_s=0.0, in_flight=1)

    plan = sim_plan("disaggregated", split=(1, 3), in_flight=1)
    result = simulate(Setting(plan=plan, costs=profile), requests)
    assert guess_s == pytest.approx(result.makespan_s, rel=0.02)
    assert guess_s > 1.5 * guessed_s(one, requests, profile, overhead=1.0, handover_s=0.0, in_flight=4)


def test_a_slow_link_makes_the_guess_longer() -> None:
    one, requests = Arrangement(rows=1, split=(1, 3)), asked([5] * 8, prompt=100)

    fast_s = guessed_s(one, requests, costs(0.4, 0.04), overhead=1.0, handover_s=0.001)
    slow_s = guessed_s(one, requests, costs(0.4, 0.04), overhead=1.0, handover_s=0.1)

    assert (fast_s < 8 * 0.4 + 1, slow_s > 8 * 10) == (True, True)
