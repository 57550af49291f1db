"""A sweep's table out of what its points left."""

from __future__ import annotations

import json
from pathlib import Path

from dejavu.report.sweep_table import SweepPoint, main_figures, sweep_rows


def point(folder: Path, number: int, outcome: str = "done", **swept: str) -> SweepPoint:
    return SweepPoint(
        number=number, swept=swept, outcome=outcome, reason="" if outcome == "done" else "no", folder=folder
    )


def left(folder: Path, name: str, document: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(document), encoding="utf-8")
    return folder


def test_a_simulated_point_shows_its_makespan_throughput_and_latency(tmp_path: Path) -> None:
    facts = {
        "makespan_s": 4.0,
        "throughput": {"requests_per_s": 2.0, "tokens_per_s": 30.0},
        "latency": {"normalized_s_per_token": {"median": 0.5}},
        "cost": None,
    }
    found = main_figures(left(tmp_path, "simulation.json", facts))
    assert found == {"makespan_s": 4.0, "requests_per_s": 2.0, "tokens_per_s": 30.0, "latency_s_per_token": 0.5}


def test_a_planned_point_shows_its_decision_and_promise(tmp_path: Path) -> None:
    plan = {"mode": "disaggregated", "split": {"prompt": 1, "token": 3}, "predicted": {"tokens_per_s": 9.0}}
    found = main_figures(left(tmp_path, "plan.json", plan))
    assert found == {"mode": "disaggregated", "prompt_machines": 1, "token_machines": 3, "tokens_per_s": 9.0}


def test_what_was_measured_counts_more_than_what_was_planned(tmp_path: Path) -> None:
    left(tmp_path, "plan.json", {"predicted": {"tokens_per_s": 9.0}})
    left(tmp_path, "metrics.json", {"throughput": {"tokens_per_s": 7.0}})
    assert main_figures(tmp_path) == {"tokens_per_s": 7.0}


def test_all_rows_have_the_same_columns_also_where_a_point_left_nothing_or_half_a_file(tmp_path: Path) -> None:
    done = left(tmp_path / "0", "simulation.json", {"makespan_s": 1.0})
    torn = left(tmp_path / "2", "simulation.json", {})
    (torn / "simulation.json").write_text('{"makespan', encoding="utf-8")
    rows = sweep_rows(
        [
            point(done, 0, rows="4"),
            point(tmp_path / "1", 1, "failed", rows="8", depth="2"),
            point(torn, 2, "failed", rows="9"),
        ]
    )
    assert rows == [
        {"job": 0, "rows": "4", "depth": "-", "outcome": "done", "makespan_s": 1.0, "reason": ""},
        {"job": 1, "rows": "8", "depth": "2", "outcome": "failed", "makespan_s": "-", "reason": "no"},
        {"job": 2, "rows": "9", "depth": "-", "outcome": "failed", "makespan_s": "-", "reason": "no"},
    ]
