"""metrics.json: the definitions hold, and what is undefined is null."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from dejavu.ids import RequestId
from dejavu.report.counters import SwapTotals, WorkerCounters
from dejavu.report.metrics import RequestTimes, quantile, summarize, write_metrics
from dejavu.request import Completion

from harness.receipts import repair_receipt


def completion(
    name: str,
    num_tokens: int,
    *,
    reason: str = "length",
    arrival_s: float = 0.0,
    first_s: float | None = 1.0,
    end_s: float = 2.0,
    resumed: int = 0,
) -> Completion:
    return Completion(
        id=RequestId(name),
        prompt_tokens=10,
        tokens=tuple(range(num_tokens)),
        text="",
        finish_reason=reason,
        arrival_s=arrival_s,
        first_token_s=first_s,
        end_s=end_s,
        resumed=resumed,
        error="too long" if reason == "error" else None,
    )


def counters(name: str, **values: float | str | tuple[int, int] | dict[str, int]) -> WorkerCounters:
    defaults = {"name": name, "pipeline": "token", "stage": 0, "layers": (0, 5)}
    return msgspec.convert(defaults | values, WorkerCounters)


def test_times_count_from_arrival() -> None:
    times = RequestTimes.of(completion("a", 5, arrival_s=0.5, first_s=1.0, end_s=3.0))
    assert times.latency_s == 2.5
    assert times.time_to_first_token_s == 0.5
    assert times.normalized_s == 0.5
    assert times.time_per_output_token_s == 0.5


def test_token_times_give_the_gaps_and_sharpen_the_time_per_token() -> None:
    times = RequestTimes.of(completion("a", 3, first_s=1.0, end_s=9.0), [1.0, 1.5, 3.0])
    assert times.gaps_s == (0.5, 1.5)
    assert times.time_per_output_token_s == 1.0


def test_one_token_has_no_time_per_output_token_and_none_has_no_normalized_latency() -> None:
    assert RequestTimes.of(completion("a", 1), [1.0]).time_per_output_token_s is None
    assert RequestTimes.of(completion("a", 0)).normalized_s is None


@pytest.mark.parametrize(
    ("values", "fraction", "expected"),
    [([], 0.5, None), ([3.0], 0.95, 3.0), ([2.0, 1.0], 0.5, 1.5), ([1.0, 2.0, 3.0, 4.0, 5.0], 0.95, 4.8)],
)
def test_quantile_interpolates_between_neighbours(values: list[float], fraction: float, expected: float | None) -> None:
    assert quantile(values, fraction) == pytest.approx(expected)


def test_run_of_two_requests_has_its_throughput_and_latency() -> None:
    completions = [completion("a", 4, end_s=2.0), completion("b", 6, arrival_s=1.0, first_s=1.5, end_s=4.0)]
    metrics = summarize(completions, {RequestId("a"): [1.0, 1.2, 1.4, 2.0]}, {}, 4.0)
    assert metrics["requests"] == {
        "submitted": 2,
        "finished": 2,
        "failed": 0,
        "resumed": 0,
        "by_reason": {"length": 2},
    }
    assert metrics["tokens"] == {"prompt": 20, "generated": 10}
    assert metrics["throughput"] == {"tokens_per_s": 2.5, "requests_per_s": 0.5}
    assert metrics["latency"]["normalized_s_per_token"]["median"] == 0.5
    assert metrics["latency"]["time_to_first_token_s"]["median"] == 0.75
    assert metrics["latency"]["inter_token_s"]["max"] == pytest.approx(0.6)


def test_failed_requests_count_as_failed_and_leave_the_latencies_alone() -> None:
    completions = [
        completion("ok", 2),
        completion("refused", 0, reason="error", first_s=None, end_s=500.0),
        completion("aborted", 3, reason="abort", end_s=500.0, resumed=1),
    ]
    metrics = summarize(completions, {}, {}, 10.0, num_submitted=5)
    assert metrics["requests"] == {
        "submitted": 5,
        "finished": 1,
        "failed": 4,
        "resumed": 1,
        "by_reason": {"abort": 1, "error": 1, "length": 1},
    }
    assert metrics["tokens"] == {"prompt": 20, "generated": 5}
    assert metrics["latency"]["normalized_s_per_token"]["max"] == 1.0


def test_stages_have_busy_shares_and_transfers_are_summed() -> None:
    workers = {
        "w1": counters("w1", stage=1, compute_s=1.0, window_s=4.0, stream_bytes=10, kv={"accepted": 5, "late": 1}),
        "w0": counters("w0", compute_s=3.0, window_s=4.0, stream_bytes=20, stream_hidden_s=0.75, kv={"accepted": 2}),
        "p0": counters("p0", pipeline="prompt", stream_exposed_s=0.25, replica_bytes=7),
    }
    metrics = summarize([], {}, workers, 1.0)
    shares = [(stage["worker"], stage["busy_share"]) for stage in metrics["stages"]]
    assert shares == [("p0", None), ("w0", 0.75), ("w1", 0.25)]
    assert metrics["transfers"]["streamed"] == {"bytes": 30, "hidden_s": 0.75, "exposed_s": 0.25, "hidden_share": 0.75}
    assert metrics["transfers"]["replicated"]["bytes"] == 7
    assert metrics["kv"] == {"accepted": 7, "duplicate": 0, "stale": 0, "corrupt": 0, "late": 1}


def test_of_swap_copies_only_those_are_hidden_that_nobody_made_or_waited_for() -> None:
    swap = SwapTotals(bytes_in=6, bytes_out=4, busy_s=5.0, own_s=1.0, wait_s=1.5, steps=3, waits=2)
    metrics = summarize([], {}, {"w0": msgspec.structs.replace(counters("w0"), swap=swap)}, 1.0)
    assert metrics["transfers"]["swapped"] == {"bytes": 10, "hidden_s": 2.5, "exposed_s": 2.5, "hidden_share": 0.5}
    assert (metrics["swap"]["own_s"], metrics["stages"][0]["swap"]["waits"]) == (1.0, 2)
    alone = SwapTotals(busy_s=1.0, own_s=1.0)
    metrics = summarize([], {}, {"w0": msgspec.structs.replace(counters("w0"), swap=alone)}, 1.0)
    assert metrics["transfers"]["swapped"]["hidden_s"] == 0


@pytest.mark.parametrize(
    ("completions", "wall_s"),
    [
        ([], 0.0),
        ([], 3.0),
        ([completion("a", 0, reason="error", first_s=None)], 0.0),
        ([completion("a", 0, reason="stop")], 0.0),
        ([completion("a", 1, reason="stop", first_s=0.0, end_s=0.0)], 0.0),
    ],
    ids=["nothing in no time", "nothing", "only an error", "empty answer", "one token in no time"],
)
def test_metrics_of_an_empty_run_are_null_and_never_nan(
    tmp_path: Path, completions: list[Completion], wall_s: float
) -> None:
    path = tmp_path / "metrics.json"
    write_metrics(path, summarize(completions, {}, {"w0": counters("w0")}, wall_s))
    text = path.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    read = json.loads(text)
    assert read["latency"]["inter_token_s"] == {"median": None, "p95": None, "max": None}
    assert read["stages"][0]["busy_share"] is None
    if wall_s == 0:
        assert read["throughput"] == {"tokens_per_s": None, "requests_per_s": None}


def test_metrics_file_is_indented_whole_and_lists_the_repairs(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text("old")
    write_metrics(path, summarize([], {}, {}, 1.0, [repair_receipt(steps_recomputed={0: 1})]))
    assert path.read_text().startswith('{\n  "requests": {\n')
    (repair,) = json.loads(path.read_text())["repairs"]
    assert repair["failures"] == [{"worker": "w2", "cause": "exit", "reason": "died (killed by signal 9)"}]
    assert repair["steps_recomputed"] == {"0": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.json"]


def test_counters_survive_the_wire() -> None:
    sent = counters("w0", kv={"accepted": 1}, layers=(3, 7))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=WorkerCounters) == sent
