"""What ``workflow=swapping`` takes, compares and tells."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest

from dejavu.config import MODEL_KINDS, Config, Scheduling, WorkflowName
from dejavu.config.strategy import Swapping
from dejavu.config.swap import check_swap
from dejavu.control.memory import Limits, fits
from dejavu.errors import ConfigError, DejavuError
from dejavu.ids import RequestId
from dejavu.report.figure_style import Caption
from dejavu.report.progress import SilentProgress
from dejavu.report.swap_figure import draw_swaps
from dejavu.report.swap_lengths import draw_lengths
from dejavu.report.swap_runs import CASES, DOUBLE, EQUAL, RESIDENT, SwapRun, summarise_swaps, swap_rows
from dejavu.workflows.swapping import compare, write_rounds
from dejavu.workflows.swapping_case import device_bytes, prepare_cases
from dejavu.workflows.swapping_lengths import points_of, stops_of

from harness.cluster_kit import configured

FIG13 = ("experiment=fig13", "swap.models=[tiny-opt]", "swap.batches=[2,4]")


def run(case: str, tokens_per_s: float, *, round_index: int = 0, batch: int = 2, length: int = 96) -> SwapRun:
    swapped = case != RESIDENT
    return SwapRun(
        model="tiny-opt",
        batch=batch,
        length=length,
        case=case,
        rows=batch * (2 if case == DOUBLE else 1),
        round_index=round_index,
        turn=0,
        wall_s=10.0,
        tokens_per_s=tokens_per_s,
        prompt_s=0.2,
        step_s=0.1,
        steps=4,
        bytes_in=8 * swapped,
        bytes_out=4 * swapped,
        unused_bytes=0,
        waits=0,
        wait_s=2.0 * swapped,
        busy_s=3.0 * swapped,
        own_s=1.0 * swapped,
    )


RUNS = [
    run(RESIDENT, 100.0), run(EQUAL, 90.0), run(DOUBLE, 150.0),
    run(DOUBLE, 190.0, round_index=1), run(RESIDENT, 100.0, round_index=1), run(EQUAL, 98.0, round_index=1),
]  # fmt: skip


@pytest.fixture(scope="module")
def fig13() -> Config:
    return configured(*FIG13)


def test_gains_are_ratios_within_a_round_and_traffic_is_that_of_a_step() -> None:
    resident, equal, double = summarise_swaps(RUNS, num_stages=2)
    assert [one.case for one in (resident, equal, double)] == list(CASES)
    assert (equal.gains, double.gains) == ((0.9, 0.98), (1.5, 1.9))
    assert double.gain == pytest.approx(1.7)
    assert (double.bytes_a_step, double.wait_share, resident.wait_share) == (3.0, 0.1, 0.0)
    shown = swap_rows([double])[0]
    assert (shown["wait_percent"], shown["own_copy_percent"]) == (pytest.approx(10.0), pytest.approx(5.0))


def test_every_run_is_a_line_as_soon_as_it_is_over_and_the_figure_is_a_picture(tmp_path: Path) -> None:
    for number in range(len(RUNS)):
        write_rounds(tmp_path / "rounds.csv", RUNS[: number + 1])
    lines = (tmp_path / "rounds.csv").read_text().splitlines()
    assert len(lines) == 1 + len(RUNS)
    assert lines[0].startswith("model,batch,length,case,rows,round,turn,wall_s,tokens_per_s")
    draw_swaps(
        tmp_path / "figure.png", summarise_swaps(RUNS, 2), Caption(title="a title", subtitle="below", source="here")
    )
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_twice_the_rows_fit_the_same_device_only_when_they_are_swapped(fig13: Config) -> None:
    for cases in prepare_cases(fig13, SilentProgress()):
        plans = {case.name: case.prepared.plan for case in cases}
        memory_bytes = device_bytes(plans[RESIDENT])
        assert device_bytes(plans[DOUBLE]) == memory_bytes
        assert device_bytes(plans[EQUAL]) < memory_bytes
        assert fits(plans[DOUBLE], Limits(device_bytes=memory_bytes))
        assert not fits(plans[DOUBLE], Limits(device_bytes=memory_bytes - 1))
        assert len({id(case.prepared.requests) for case in cases}) == 1


def test_measured_gains_stand_beside_the_rules_and_stop_where_they_fall_to_one(tmp_path: Path) -> None:
    gains = {100: 1.5, 200: 1.1, 300: 0.9}
    runs = [
        run(case, 100.0 * (gain if case == DOUBLE else 1.0), length=length)
        for length, gain in gains.items()
        for case in (RESIDENT, DOUBLE)
    ]
    # A token of 2 rows crosses the bus in 0.4 ms: a step of 100 ms hides 250 of them.
    points = points_of(summarise_swaps(runs, 2), 20, {"tiny-opt": 0.2e-3})
    assert [one.gain for one in points] == pytest.approx([1.5, 1.1, 0.9])
    assert points[0].rule_gain == pytest.approx((0.4 + 2 * 80 * 0.1) / (0.4 + 81 * 0.1))
    assert points[0].full_rule_gain < points[0].rule_gain * 1.05
    assert points[2].full_rule_gain < 1.5 < points[2].rule_gain
    stops = stops_of(points)["tiny-opt", 2]
    assert stops.measured == pytest.approx(250.0)
    assert stops.rule is None
    assert stops.off_percent is None
    assert replace(stops, full_rule=200.0).off_percent == pytest.approx(25.0)
    caption = Caption(title="a title", subtitle="below", source="here")
    draw_lengths(tmp_path / "figure.png", points, {("tiny-opt", 2): stops}, caption)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_swapping_that_is_slower_at_every_length_is_said_to_be_so() -> None:
    runs = [
        run(case, 100.0 * (gain if case == DOUBLE else 1.0), length=length)
        for length, gain in {100: 0.9, 200: 0.8}.items()
        for case in (RESIDENT, DOUBLE)
    ]
    stops = stops_of(points_of(summarise_swaps(runs, 2), 20, {"tiny-opt": 0.2e-3}))["tiny-opt", 2]
    assert (stops.measured, stops.words(stops.measured)) == (100, "at all of these lengths")
    assert stops.words(stops.rule) == "not even at the longest of these lengths"
    assert stops.off_percent is None


def test_a_token_that_swapping_changed_is_an_error_that_names_case_and_request(fig13: Config) -> None:
    (cases, *_) = prepare_cases(fig13, SilentProgress())
    right = {request.id: (1, 2) for request in cases[0].prepared.requests}
    compare(cases, dict.fromkeys(CASES, right))
    wrong = {**right, RequestId("synthetic-3"): (1, 3)}
    with pytest.raises(DejavuError, match="tiny-opt-2x128-B-swapped: the tokens of request synthetic-3 differ"):
        compare(cases, {RESIDENT: right, EQUAL: wrong, DOUBLE: right})


@pytest.mark.parametrize(
    ("section", "key", "value", "advice"),
    [
        ("swap", "models", [], "each must be a kind of model"),
        ("swap", "models", ["gpt-9"], "each must be a kind of model"),
        ("swap", "batches", [0], "at least 1 row"),
        ("swap", "repeats", 0, "at least 1 round"),
        ("swap", "lengths", [64], "each must be at least 66 tokens"),
        ("swap", "lengths", [128], "swap.lengths needs swap.bus_gbps"),
        ("swap", "bus_gbps", 0.0, "swap.bus_gbps"),
        ("strategy", "in_flight", 3, "at least 4"),
        ("strategy", "swapping", Swapping.on, "sets it for each case"),
        ("strategy", "scheduling", Scheduling.row, "needs strategy=colocated strategy.scheduling=microbatch"),
        ("cluster", "device_memory_gb", 1.0, "which sets what a batch B needs"),
        ("workload", "median_tokens", 4.0, "needs workload=synthetic with equal answers"),
        ("workflow", "name", WorkflowName.generate, "swap is for workflow=swapping"),
    ],
)
def test_a_measurement_that_cannot_be_made_is_refused_with_what_to_change(
    fig13: Config, section: str, key: str, value: object, advice: str
) -> None:
    config = copy.deepcopy(fig13)
    setattr(getattr(config, section), key, value)
    with pytest.raises(ConfigError, match=advice):
        check_swap(config, MODEL_KINDS, is_measuring=config.workflow.name is WorkflowName.swapping)
