"""Simulated clusters whose times can be worked out by hand."""

from __future__ import annotations

from typing import ClassVar

import pytest

from dejavu.planning.costs import GivenCosts
from dejavu.sim.machinery import Machinery
from dejavu.sim.reference import colocated, disaggregated
from dejavu.sim.simulation import Setting, SimulationResult, simulate

from harness.sim_kit import NUM_LAYERS, POSITION_BYTES, asked, costs, sim_plan

UNEVEN = [2, 5, 3, 8, 4, 6, 2, 7, 9, 3, 5, 4]


def ends(result: SimulationResult) -> list[float]:
    return [one.end_s for one in result.requests]


def test_a_lone_request_takes_its_prompt_and_a_step_for_every_further_token() -> None:
    result = simulate(Setting(plan=sim_plan("colocated"), costs=costs(0.4, 0.04)), asked([6]))

    assert result.makespan_s == pytest.approx(0.4 + 5 * 0.04)
    assert result.requests[0].first_token_s == pytest.approx(0.4)
    assert result.requests[0].normalized_s == pytest.approx(0.6 / 6)


def test_a_request_that_its_first_token_ends_takes_no_step() -> None:
    result = simulate(Setting(plan=sim_plan("disaggregated", split=(2, 2)), costs=costs(0.4, 0.04)), asked([1]))

    assert result.makespan_s == pytest.approx(0.4)
    assert result.workers["w2"].total_busy_s == 0.0  # type: ignore[index]


@pytest.mark.parametrize("trace", [[4] * 8, UNEVEN], ids=["even", "uneven"])
def test_a_colocated_pipeline_of_whole_microbatches_ends_with_the_original_simulator(trace: list[int]) -> None:
    """The same schedule, found by other means. The originals count one pass more, hence the one token more here."""
    result = simulate(Setting(plan=sim_plan("colocated"), costs=costs(0.04, 0.004)), asked([new + 1 for new in trace]))
    original = colocated(trace, [0.0] * len(trace), depth=4, prompt_s=0.01, token_s=0.001)

    assert result.makespan_s == pytest.approx(original.makespan_s)


@pytest.mark.parametrize("split", [(2, 2), (1, 3), (3, 1)])
def test_a_disaggregated_cluster_with_rows_to_run_ahead_ends_no_later_than_the_original_simulator(
    split: tuple[int, int],
) -> None:
    """The originals let nothing pass a prompt that is late, and hold prompts back by nothing."""
    plan = sim_plan("disaggregated", split=split, in_flight=len(UNEVEN))
    result = simulate(Setting(plan=plan, costs=costs(0.04, 0.004)), asked([new + 1 for new in UNEVEN]))
    original = disaggregated(
        UNEVEN,
        [0.0] * len(UNEVEN),
        prompt_depth=split[0],
        token_depth=split[1],
        prompt_s=0.04 / split[0],
        token_s=0.004 / split[1],
    )

    assert result.makespan_s <= original.makespan_s + 1e-9
    assert result.makespan_s >= 0.95 * original.makespan_s


def test_prompts_wait_for_rows_on_the_token_side() -> None:
    """One microbatch in flight: a prompt begins when the tokens before it are done, so nothing overlaps."""
    plan = sim_plan("disaggregated", split=(3, 1), in_flight=1)

    result = simulate(Setting(plan=plan, costs=costs(0.4, 0.04)), asked([5, 5, 5]))

    assert ends(result) == pytest.approx([0.56, 1.12, 1.68])
    assert result.most_waiting_bytes == NUM_LAYERS * POSITION_BYTES


def test_requests_that_come_later_are_served_later() -> None:
    result = simulate(Setting(plan=sim_plan("colocated"), costs=costs(0.4, 0.04)), asked([2, 2], arrival_s=[0.0, 10.0]))

    assert ends(result) == pytest.approx([0.44, 10.44])


def test_streaming_overhead_slows_prompts_of_a_prompt_pipeline_alone() -> None:
    machinery = Machinery(streaming_overhead=1.5)

    split = simulate(Setting(plan=sim_plan("disaggregated"), costs=costs(0.4, 0.04), machinery=machinery), asked([1]))
    whole = simulate(Setting(plan=sim_plan("colocated"), costs=costs(0.4, 0.04), machinery=machinery), asked([1]))

    assert (split.makespan_s, whole.makespan_s) == pytest.approx((0.6, 0.4))


def test_a_hop_costs_its_time_between_stages_and_back_to_the_first() -> None:
    setting = Setting(plan=sim_plan("colocated"), costs=costs(0.4, 0.04), machinery=Machinery(hop_s=0.01))

    result = simulate(setting, asked([2]))

    assert result.makespan_s == pytest.approx(0.4 + 3 * 0.01 + 0.04 + 4 * 0.01)


def test_kv_that_outlasts_its_prompt_delays_the_first_step_and_occupies_the_link() -> None:
    prompt, seconds = 1000, 2.0
    num_bytes = NUM_LAYERS * prompt * POSITION_BYTES
    machinery = Machinery(link_bytes_per_s=num_bytes / seconds)

    result = simulate(
        Setting(plan=sim_plan("disaggregated"), costs=costs(0.12, 0.04), machinery=machinery), asked([2], prompt=prompt)
    )

    # The first of twelve layers leaves after a twelfth of the prompt, and all of them follow without a gap.
    assert result.makespan_s == pytest.approx(0.01 + seconds + 0.04, abs=1e-3)
    assert result.workers["w0"].sent_s == pytest.approx(seconds)  # type: ignore[index]
    assert result.sent_bytes == num_bytes


def test_kv_of_one_prompt_waits_for_that_of_the_one_before_on_the_same_link() -> None:
    num_bytes = NUM_LAYERS * 1000 * POSITION_BYTES
    setting = Setting(
        plan=sim_plan("disaggregated", in_flight=2),
        costs=costs(0.12, 0.04),
        machinery=Machinery(link_bytes_per_s=num_bytes / 2.0),
    )

    result = simulate(setting, asked([2, 2], prompt=1000))

    assert ends(result) == pytest.approx([2.05, 4.05], abs=1e-3)


def test_two_replicas_share_one_queue() -> None:
    """Two long answers and four short ones: whoever is done takes the next."""
    setting = Setting(plan=sim_plan("colocated", depth=1), replicas=2, costs=costs(0.0, 1.0))

    result = simulate(setting, asked([11, 2, 2, 2, 2, 2]))

    assert result.makespan_s == pytest.approx(10.0)
    assert [times.total_busy_s for times in result.workers.values()] == pytest.approx([10.0, 5.0])


def test_swapping_that_takes_longer_than_a_round_is_what_a_step_takes() -> None:
    positions, in_flight = 1000, 4
    num_bytes = NUM_LAYERS * positions * POSITION_BYTES
    slow = Machinery(is_swapping=True, pcie_bytes_per_s=num_bytes / 1.0)
    plan = sim_plan("colocated", depth=1, in_flight=in_flight)

    result = simulate(Setting(plan=plan, costs=costs(0.0, 0.01), machinery=slow), asked([11] * 4, prompt=positions))

    # Forty steps, each of which waits for about a second of transfers, of ever more cells.
    assert result.makespan_s == pytest.approx(40 * 1.005, rel=0.05)
    assert result.workers["w0"].swapped_s == pytest.approx(result.makespan_s, rel=0.05)  # type: ignore[index]


@pytest.mark.parametrize("bandwidth", [None, 1e12])
def test_swapping_that_hides_under_steps_costs_nothing(bandwidth: float | None) -> None:
    plan = sim_plan("colocated", depth=2, in_flight=4)
    still = simulate(Setting(plan=plan, costs=costs(0.1, 0.01)), asked([9] * 8))

    swapped = simulate(
        Setting(
            plan=plan,
            costs=costs(0.1, 0.01),
            machinery=Machinery(is_swapping=True, pcie_bytes_per_s=bandwidth),
        ),
        asked([9] * 8),
    )

    assert swapped.makespan_s == pytest.approx(still.makespan_s, rel=1e-3)


def test_early_stops_leave_bubbles_in_a_colocated_pipeline_and_none_in_a_token_pipeline() -> None:
    """DejaVu §3.1: prompts that come between the steps of others hold those up."""
    even, early = [40] * 32, [10, 70] * 16
    whole = sim_plan("colocated", depth=4)
    split = sim_plan("disaggregated", split=(2, 2), in_flight=8)

    def makespan(plan: object, trace: list[int]) -> float:
        setting = Setting(plan=plan, costs=costs(1.2, 0.03))  # type: ignore[arg-type]
        return simulate(setting, asked(trace)).makespan_s

    assert makespan(whole, early) > 1.15 * makespan(whole, even)
    assert makespan(split, early) < 1.1 * makespan(split, even)


class Asking(GivenCosts):
    """Remembers what it was asked."""

    questions: ClassVar[list[tuple[str, int, float]]] = []

    def prompt_time_s(self, rows: int, tokens: float) -> float:
        self.questions.append(("prompt", rows, tokens))
        return 0.4

    def step_time_s(self, rows: int, context: float) -> float:
        self.questions.append(("step", rows, context))
        return 0.04


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Asking:
    monkeypatch.setattr(Asking, "questions", [])
    return Asking(rows=1, whole_prompt_time_s=0.0, whole_token_time_s=0.0)


@pytest.mark.parametrize(("new", "rows"), [([3, 2, 3], 3), ([2, 3, 3], 2), ([2, 2, 3], 1)])
def test_a_step_has_every_row_from_the_first_live_one_to_the_last(asking: Asking, new: list[int], rows: int) -> None:
    simulate(Setting(plan=sim_plan("colocated", depth=1, rows=3), costs=asking), asked(new, prompt=7))

    assert asking.questions[-1] in {("step", rows, 8), ("step", rows, 1)}
    assert ("step", 3, 7) in asking.questions


def test_the_profile_is_asked_with_rows_and_lengths(asking: Asking) -> None:
    simulate(Setting(plan=sim_plan("colocated", rows=2), costs=asking), asked([3, 3], prompt=7))

    assert set(asking.questions) == {("prompt", 2, 7), ("step", 2, 1), ("step", 2, 7), ("step", 2, 8)}
