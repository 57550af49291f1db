"""A rehearsal says how well it kept to its times."""

from __future__ import annotations

import logging

import pytest

from dejavu.planning.costs import GivenCosts, ScaledCosts
from dejavu.report.counters import RehearsalCounters, WorkerCounters
from dejavu.report.lateness import log_rehearsal, rehearsal_line
from dejavu.report.metrics import Metrics, summarize


def metrics_of(*late_s: float) -> Metrics:
    """Of a run whose stages each planned 10 s and were so late."""
    workers = {
        f"w{stage}": WorkerCounters(
            name=f"w{stage}",
            pipeline="colocated",
            stage=stage,
            layers=(stage, stage + 1),
            rehearsal=RehearsalCounters(
                time_scale=0.5, kv_scale=0.25, passes=100, planned_s=10.0, late_s=late, most_late_s=late / 10
            ),
        )
        for stage, late in enumerate(late_s)
    }
    return summarize([], {}, workers, 12.0)


def test_metrics_add_up_the_stages_and_name_the_latest_pass() -> None:
    rehearsal = metrics_of(0.1, 0.3)["rehearsal"]
    assert rehearsal is not None
    assert (rehearsal["passes"], rehearsal["planned_s"]) == (200, 20.0)
    assert rehearsal["late_s"] == pytest.approx(0.4)
    assert rehearsal["late_share"] == pytest.approx(0.02)
    assert rehearsal["most_late_s"] == pytest.approx(0.03)
    assert "times × 0.5, KV × 0.25" in rehearsal_line(rehearsal)


def test_a_run_that_computed_has_no_rehearsal() -> None:
    assert metrics_of()["rehearsal"] is None


@pytest.mark.parametrize(("late_s", "level"), [(0.1, logging.INFO), (0.5, logging.WARNING)])
def test_a_machine_that_cannot_keep_up_is_a_warning(
    caplog: pytest.LogCaptureFixture, late_s: float, level: int
) -> None:
    with caplog.at_level(logging.INFO):
        log_rehearsal(metrics_of(late_s))
    assert max(record.levelno for record in caplog.records) == level


def test_scaled_costs_multiply_both_times_and_say_so() -> None:
    costs = ScaledCosts(costs=GivenCosts(rows=2, whole_prompt_time_s=1.0, whole_token_time_s=0.1), scale=0.5)
    assert costs.prompt_time_s(4, 10) == pytest.approx(1.0)
    assert costs.step_time_s(4, 10) == pytest.approx(0.05)
    assert costs.source.endswith("times 0.5")
