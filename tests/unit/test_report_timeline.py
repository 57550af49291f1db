"""timeline.json: a trace that a viewer shows without crossings, one process row a worker."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejavu.report.spans import Span
from dejavu.report.timeline import check_timeline, read_timeline, write_timeline

START_S = 1_790_000_000.0


def written(path: Path, workers: dict[str, list[Span]], **options: Any) -> list[dict[str, Any]]:
    write_timeline(path, workers, **options)
    return json.loads(path.read_text())["traceEvents"]  # type: ignore[no-any-return]


def complete(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def test_timeline_has_a_named_process_for_each_worker_in_the_given_order(tmp_path: Path) -> None:
    events = written(tmp_path / "t.json", {"w1": [], "w0": [Span("step", "compute", START_S, 1.0)]})
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert names == {1: "w1", 2: "w0"}
    assert order == {1: 1, 2: 2}


def test_timeline_event_has_microseconds_of_the_run_category_and_args(tmp_path: Path) -> None:
    span = Span("flush", "stream", START_S + 0.5, 0.25, {"bytes": 4096, "to": "w1"})
    events = written(tmp_path / "t.json", {"w0": [span]}, start_s=START_S)
    (event,) = complete(events)
    assert (event["ts"], event["dur"]) == (500_000, 250_000)
    assert (event["name"], event["cat"], event["args"]) == ("flush", "stream", {"bytes": 4096, "to": "w1"})
    row = next(one for one in events if one["name"] == "thread_name" and one["tid"] == event["tid"])
    assert row["args"]["name"] == "stream"


def test_timeline_events_are_in_order_of_time_over_all_workers(tmp_path: Path) -> None:
    workers = {
        f"w{worker}": [Span("step", "compute", START_S + (7 * number + worker) % 11, 0.5) for number in range(10)]
        for worker in range(3)
    }
    events = complete(written(tmp_path / "t.json", workers))
    assert len(events) == 30
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    assert events[0]["ts"] == 0


def test_span_before_the_given_start_moves_the_origin(tmp_path: Path) -> None:
    spans = [Span("load", "load", START_S - 2.0, 1.0), Span("step", "compute", START_S, 1.0)]
    assert [event["ts"] for event in complete(written(tmp_path / "t.json", {"w": spans}, start_s=START_S))] == [
        0,
        2_000_000,
    ]


def test_nested_spans_share_a_row_and_crossing_ones_do_not(tmp_path: Path) -> None:
    spans = [
        Span("outer", "stream", START_S, 1.0),
        Span("inner", "stream", START_S + 0.2, 0.3),
        Span("crossing", "stream", START_S + 0.9, 1.0),
    ]
    events = written(tmp_path / "t.json", {"w": spans})
    rows = {event["name"]: event["tid"] for event in complete(events)}
    assert rows["outer"] == rows["inner"] != rows["crossing"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["stream", "stream 2"]


def test_neighbours_that_overlap_by_rounding_stay_in_one_row(tmp_path: Path) -> None:
    spans = [Span(str(number), "compute", START_S + number * 1e-4, 1.008e-4) for number in range(50)]
    events = complete(written(tmp_path / "t.json", {"w": spans}))
    assert len({event["tid"] for event in events}) == 1
    assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(events))


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 40)),
        max_size=25,
    )
)
def test_no_two_events_of_a_row_cross(tmp_path_factory: pytest.TempPathFactory, times: list[tuple[int, int]]) -> None:
    spans = [Span("s", "wait", START_S + start * 1e-6, length * 1e-6) for start, length in times]
    events = complete(written(tmp_path_factory.mktemp("trace") / "t.json", {"w": spans}))
    assert len(events) == len(spans)
    for row in {event["tid"] for event in events}:
        own = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["tid"] == row]
        for index, (start, end) in enumerate(own):
            for other_start, other_end in own[index + 1 :]:
                assert other_start >= end or other_end <= end, (start, end, other_start, other_end)


def test_timeline_of_nothing_is_loadable(tmp_path: Path) -> None:
    assert written(tmp_path / "t.json", {}) == []
    assert complete(written(tmp_path / "t.json", {"w0": []})) == []
    assert read_timeline(tmp_path / "t.json").displayTimeUnit == "ms"


def test_infinite_arg_becomes_null(tmp_path: Path) -> None:
    (event,) = complete(written(tmp_path / "t.json", {"w": [Span("s", "wait", START_S, 1.0, {"x": float("inf")})]}))
    assert event["args"] == {"x": None}


def test_lost_spans_are_noted_in_the_file(tmp_path: Path) -> None:
    write_timeline(tmp_path / "t.json", {"w0": [], "w1": []}, num_dropped={"w0": 12, "w1": 0})
    assert read_timeline(tmp_path / "t.json").otherData == {"start_s": 0.0, "dropped_spans_w0": 12}


def test_timeline_leaves_no_partial_file(tmp_path: Path) -> None:
    write_timeline(tmp_path / "t.json", {"w0": []})
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.parametrize(
    ("event", "complaint"),
    [
        ({"name": "s", "ph": "X", "pid": 9, "tid": 1, "ts": 0, "dur": 1}, "no name"),
        ({"name": "s", "ph": "X", "pid": 1, "tid": 1, "ts": 0}, "lacks"),
        ({"name": "s", "ph": "X", "pid": 1, "tid": 1, "ts": -5, "dur": 1}, "before its predecessor"),
    ],
)
def test_trace_with_a_broken_event_is_refused(event: dict[str, Any], complaint: str) -> None:
    named = {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "w0"}}
    content = json.dumps({"traceEvents": [named, event]}).encode()
    with pytest.raises(ValueError, match=complaint):
        check_timeline(content)
