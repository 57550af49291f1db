"""Repairs in metrics.json, in the report for a person, and on the timeline."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from dejavu.control.receipts import receipts, repair_spans, with_repairs
from dejavu.ids import WorkerName
from dejavu.report.metrics import summarize
from dejavu.report.repairs import PARTS, repair_line
from dejavu.report.spans import Span
from dejavu.report.tables import MOST_REPAIRS, render_report
from dejavu.report.timeline import read_timeline, write_timeline

from harness.receipts import START_S, TICK_S, failure, journal, repair_receipt, restored

W0 = WorkerName("w0")


def test_the_parts_of_a_pause_follow_each_other_and_add_up_to_it() -> None:
    (receipt,) = receipts([journal()])
    parts = [receipt[part] for part in PARTS]  # type: ignore[literal-required]
    assert parts == [ticks * TICK_S for ticks in (1, 2, 8, 2, 8)]
    assert receipt["total_s"] == sum(parts)


def test_a_receipt_tells_who_failed_who_took_the_place_and_where_rows_went_on() -> None:
    (receipt,) = receipts([journal()])
    assert receipt["failures"] == [{"worker": "w2", "cause": "exit", "reason": "died (killed by signal 9)"}]
    assert (receipt["how"], receipt["replaced_by"]) == ({"w2": "standby"}, {"w2": "w3"})
    assert (receipt["tier"], receipt["rows"]) == ("replica", {"replica": 4})
    assert (receipt["resume_steps"], receipt["steps_recomputed"]) == ({0: 20, 1: 20}, {0: 1, 1: 0})
    assert (receipt["bytes_restored"], receipt["bytes_replicated"]) == (1_200_000, 400_000)
    assert json.loads(json.dumps(receipt))["problem"] is None


def test_rows_that_went_on_from_different_sources_are_mixed_and_none_have_no_tier() -> None:
    (mixed,) = receipts([journal(receipt=restored(rows={"replica": 3, "recompute": 1}))])
    (idle,) = receipts([journal(receipt=restored(rows={}))])
    assert (mixed["tier"], idle["tier"]) == ("mixed", None)


def test_a_failure_that_nobody_dated_has_no_detection_and_its_pause_counts_from_when_it_was_seen() -> None:
    (receipt,) = receipts([journal(failures=(failure(since_s=None),))])
    assert receipt["detection_s"] is None
    assert receipt["total_s"] == 20 * TICK_S


def test_of_several_failures_the_first_one_seen_begins_the_pause() -> None:
    later = failure(worker=W0, seen_s=START_S + 2 * TICK_S, since_s=START_S + TICK_S)
    (receipt,) = receipts([journal(failures=(later, failure()))])
    assert receipt["detection_s"] == TICK_S
    assert len(receipt["failures"]) == 2


def test_a_repair_that_is_not_over_has_the_parts_that_are() -> None:
    (receipt,) = receipts([journal(phase="replace", replaced_s=None, receipt=None)])
    assert [receipt[part] is None for part in PARTS] == [False, False, True, True, True]  # type: ignore[literal-required]
    assert (receipt["phase"], receipt["total_s"], receipt["tier"]) == ("replace", None, None)


def test_the_line_of_a_repair_says_what_died_the_pause_by_parts_the_step_and_the_source() -> None:
    assert repair_line(repair_receipt()) == (
        "w2 died (killed by signal 9), standby w3 took its place; "
        "pause 328 ms (detected in 15.6 ms, fence 31.2 ms, replace 125 ms, restore 31.2 ms, resume 125 ms); "
        "resumed at step 20, 1 step made again; 4 rows from replicas"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"how": {"w2": "process"}}, "w2 died (killed by signal 9), a new process took its place"),
        ({"how": {"w2": "replan"}}, "w2 died (killed by signal 9), the others took its layers"),
        ({"how": {"w2": "links"}}, "w2 lost a link (died (killed by signal 9))"),
        ({"detection_s": None}, "(fence 31.2 ms,"),
        ({"resume_steps": {0: 19, 1: 21}, "steps_recomputed": {0: 2, 1: 1}}, "at steps 19 to 21, 3 steps made again"),
        ({"rows": {"replica": 3, "recompute": 1}}, "3 rows from replicas, 1 row from prompt and tokens"),
        ({"rows": {}}, "no request was open"),
        ({"total_s": None, "phase": "replace"}, "not finished (phase replace)"),
        ({"total_s": None, "problem": "w2 keeps failing"}, "given up: w2 keeps failing"),
    ],
)
def test_the_line_of_a_repair_tells_only_what_was(changes: dict[str, object], words: str) -> None:
    assert words in repair_line(repair_receipt(**changes))


def test_the_report_has_a_line_for_each_repair_and_counts_those_beyond_the_limit() -> None:
    console = Console(file=io.StringIO(), width=400, force_terminal=False)
    repairs = [repair_receipt(number=number) for number in range(1, MOST_REPAIRS + 3)]
    render_report(console, [], [], summarize([], {}, {}, 1.0, repairs))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert shown.count("standby w3 took its place") == MOST_REPAIRS
    assert "and 2 more repairs in metrics.json" in shown


def test_a_repair_is_a_band_with_its_parts_under_it_in_one_row_above_the_workers(tmp_path: Path) -> None:
    step = Span("step", "compute", START_S - 1.0, 0.5)
    write_timeline(tmp_path / "t.json", with_repairs({"w0": [step], "w1": []}, [journal()]))
    events = read_timeline(tmp_path / "t.json").traceEvents
    names = [event.args["name"] for event in events if event.name == "process_name" and event.args]
    assert names == ["cluster", "w0", "w1"]
    bands = [event for event in events if event.cat == "recover"]
    assert [event.name for event in bands] == ["repair 1", "detect", "fence", "replace", "restore", "resume"]
    assert {event.pid for event in bands} == {1}
    assert len({event.tid for event in bands}) == 1
    assert [event.dur for event in bands] == [328_125, 15_625, 31_250, 125_000, 31_250, 125_000]
    assert bands[0].args is not None
    assert bands[0].args["failed"] == "w2 died (killed by signal 9)"


def test_a_repair_that_is_not_over_ends_where_it_is_known_to_have_come() -> None:
    spans = repair_spans([journal(replaced_s=None, receipt=None)])
    assert [span.name for span in spans] == ["repair 1", "detect", "fence"]
    assert spans[0].duration_s == 3 * TICK_S


def test_without_repairs_the_timeline_has_no_row_of_the_cluster() -> None:
    assert list(with_repairs({"w0": []}, [])) == ["w0"]
