"""What a service leaves of its requests: all of them counted, the newest kept, and a full disk survived."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dejavu.config import ModelConfig
from dejavu.ids import RequestId
from dejavu.report.completions import CompletionWriter, read_completions
from dejavu.report.progress import SilentProgress
from dejavu.request import Completion
from dejavu.serving.tally import Counts, Tally
from dejavu.workflows import serve_record
from dejavu.workflows.serve import name_of
from dejavu.workflows.serve_record import ServeRecord


def line(name: str, num_tokens: int = 3, finish_reason: str = "length", end_s: float = 2.0) -> Completion:
    return Completion(
        id=RequestId(name),
        prompt_tokens=2,
        tokens=(7,) * num_tokens,
        text="",
        finish_reason=finish_reason,
        arrival_s=end_s - 1.0,
        first_token_s=end_s - 0.5,
        end_s=end_s,
    )


def times(num_tokens: int, end_s: float = 2.0) -> list[float]:
    return [end_s - 0.5 + 0.1 * index for index in range(num_tokens)]


def test_every_request_has_its_line_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    with CompletionWriter(path) as writer:
        record = ServeRecord(writer, SilentProgress())
        for name in ("a", "b"):
            record.ended(line(name), times(3))
    assert [one.id for one in read_completions(path)] == ["a", "b"]


def test_memory_is_bounded_by_tokens_and_every_request_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_record, "MOST_TOKENS", 40)
    record = ServeRecord(None, SilentProgress())
    for index in range(50):
        record.ended(line(f"r{index}", end_s=2.0 + index), times(3, 2.0 + index))
    record.ended(line("gone", 1, "abort"), times(1))
    assert len(record._recent) <= 10
    counts = Counts(submitted=53, finished=50, aborted=1, rejected=2, prompt_tokens=102, generated_tokens=151)
    metrics = record.metrics(counts, {}, 10.0, ())
    assert metrics["requests"]["by_reason"] == {"abort": 1, "length": 50, "rejected": 2}
    assert (metrics["requests"]["submitted"], metrics["requests"]["finished"], metrics["requests"]["failed"]) == (
        53,
        50,
        3,
    )
    assert metrics["tokens"] == {"prompt": 102, "generated": 151}
    assert metrics["throughput"] == {"tokens_per_s": 15.1, "requests_per_s": 5.0}
    assert metrics["latency"]["time_to_first_token_s"]["median"] == pytest.approx(0.5)
    json.dumps(metrics)


def test_a_disk_that_is_full_costs_lines_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def write(self, completion: Completion) -> None:
            raise OSError("no space left")

    record = ServeRecord(Full(), SilentProgress())  # type: ignore[arg-type]
    record.ended(line("a"), times(3))
    record.ended(line("b"), times(3))
    assert [entry.getMessage() for entry in caplog.records] == ["completions.jsonl takes no more lines: no space left"]


def test_the_counts_of_a_tally_add_up_at_every_moment() -> None:
    tally = Tally()
    for name in ("a", "b", "c", "d"):
        tally.opened(RequestId(name))
    tally.rejected()
    tally.started(RequestId("a"))
    tally.token(5)
    tally.token(0)
    tally.ended(line("a"))
    tally.ended(line("b", 0, "abort"))
    tally.ended(line("c", 0, "timeout"))
    counts = tally.counts()
    assert counts == Counts(
        submitted=5, finished=1, aborted=1, rejected=1, failed=1, queued=1, prompt_tokens=5, generated_tokens=2
    )
    assert tally.wait_empty(0.0) == ("d",)


def test_the_time_to_the_next_place_is_the_pace_of_ends_and_no_idle_time() -> None:
    tally = Tally()
    for number, end_s in enumerate([0.0, 30_000.0, 30_002.0, 30_004.0]):
        tally.opened(RequestId(f"r{number}"))
        if number == 1:
            # From here on somebody is always waiting.
            tally.opened(RequestId("waiting"))
        tally.ended(line(f"r{number}", end_s=end_s))
    assert 1.0 < tally.next_place_s < 2.0


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (ModelConfig(), "smollm2-135m"),
        (ModelConfig(kind="hub", name="org/model"), "org/model"),
        (ModelConfig(kind="local", path="/models/mine"), "mine"),
    ],
)
def test_clients_call_the_model_by_its_name_its_folder_or_its_kind(model: ModelConfig, name: str) -> None:
    assert name_of(model) == name
