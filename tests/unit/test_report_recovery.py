"""What failures cost, out of runs: curves, ratios within a round, the table and the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from dejavu.ids import RequestId
from dejavu.report.figure_style import Caption
from dejavu.report.recovery_figures import draw_requests, draw_tokens
from dejavu.report.recovery_runs import (
    CaseRun,
    case_rows,
    end_curve,
    summarise_cases,
    times_shorter,
    token_curve,
)
from dejavu.request import Completion

from harness.receipts import repair_receipt

CAPTION = Caption(title="Title", subtitle="sizes", source="machine")
A, B = RequestId("a"), RequestId("b")


def case_run(case: str, latency_s: float, *, round_index: int = 0, tokens: int = 4) -> CaseRun:
    return CaseRun(
        case=case,
        round_index=round_index,
        turn=0,
        wall_s=latency_s + 1.0,
        token_curve_s=tuple(latency_s * (token + 1) / tokens for token in range(tokens)),
        end_curve_s=(latency_s, latency_s + 1.0),
        failures_s=() if case == "none" else (1.0,),
        repairs=() if case == "none" else (repair_receipt(),),
    )


def test_a_token_has_come_when_every_row_of_the_microbatch_has_it() -> None:
    times = {A: (1.0, 2.0, 3.5), B: (1.5, 1.8, 3.0), RequestId("other"): (9.0, 9.0, 9.0)}
    assert token_curve(times, [A, B]) == (1.5, 2.0, 3.5)


def test_requests_are_counted_in_the_order_of_their_ends() -> None:
    ends = [
        Completion(
            id=RequestId(str(end_s)), prompt_tokens=1, tokens=(1,), text="", finish_reason="length",
            arrival_s=0.0, first_token_s=0.1, end_s=end_s,
        )
        for end_s in (3.0, 1.0, 2.0)
    ]  # fmt: skip
    assert end_curve(ends) == (1.0, 2.0, 3.0)


def test_ratios_compare_runs_of_one_round_and_their_median_is_the_cases() -> None:
    runs = [
        case_run(case, latency_s, round_index=index)
        for index, latencies in enumerate([(10.0, 11.0), (20.0, 30.0), (10.0, 12.0)])
        for case, latency_s in zip(("none", "replica"), latencies, strict=True)
    ]
    none, replica = summarise_cases(runs)
    assert none.ratios == (1.0, 1.0, 1.0)
    assert replica.ratios == pytest.approx((1.1, 1.5, 1.2))
    assert replica.ratio == pytest.approx(1.2)
    assert replica.typical.round_index == 2
    assert replica.latency_s == 12.0
    assert (none.pause_s, replica.pause_s) == (0.0, pytest.approx(21 / 64))
    assert (none.steps_recomputed, replica.steps_recomputed) == (0, 1)


def test_a_round_without_a_run_that_did_not_fail_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="round 1 has no run without a failure"):
        summarise_cases([case_run("none", 1.0), case_run("replica", 1.0, round_index=1)])


def test_a_run_that_shows_no_microbatch_is_as_long_as_its_last_request() -> None:
    assert case_run("none", 5.0, tokens=0).latency_s == 6.0


def test_the_table_has_the_papers_ratios_beside_those_measured_here() -> None:
    summaries = summarise_cases([case_run("none", 10.0), case_run("replica", 11.0), case_run("restart", 18.0)])
    rows = case_rows(summaries, with_paper=True)
    assert [(row["case"], row["ratio"], row["paper"]) for row in rows] == [
        ("none", 1.0, "–"),
        ("replica", pytest.approx(1.1), 1.24),
        ("restart", pytest.approx(1.8), 1.91),
    ]
    assert "paper" not in case_rows(summaries, with_paper=False)[0]
    assert times_shorter(summaries) == pytest.approx(18 / 11)
    assert times_shorter(summaries[:2]) is None


def test_the_figures_are_png_files(tmp_path: Path) -> None:
    summaries = summarise_cases([case_run(case, 10.0) for case in ("none", "replica", "recompute", "restart")])
    draw_tokens(tmp_path / "tokens.png", summaries, CAPTION)
    draw_requests(tmp_path / "requests.png", summaries, CAPTION)
    for name in ("tokens.png", "requests.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests.png", "tokens.png"]
