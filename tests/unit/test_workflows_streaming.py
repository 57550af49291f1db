"""The measurement's own decisions: the order of levels, the wait for streaming, the comparison of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dejavu.clock import VirtualClock
from dejavu.engine import messages as m
from dejavu.errors import DejavuError
from dejavu.ids import RequestId
from dejavu.kv.levels import StreamingLevel
from dejavu.report.progress import SilentProgress
from dejavu.report.spans import Span
from dejavu.request import Completion, Request
from dejavu.workflows import streaming, streaming_batch
from dejavu.workflows.streaming_batch import Bench, check_same
from dejavu.workflows.streaming_case import BatchBar, LabelledProgress, prepare_cases

from harness.cluster_kit import configured

TIMEOUT_S = 5.0
REQUESTS = tuple(Request(id=RequestId(name), prompt_tokens=(1,), max_tokens=2) for name in "ab")


class FakeController:
    """Answers at once: two tokens a request."""

    finish_reason = "length"
    tokens_each = 2

    def __init__(self, links: object, codec: object, observer: Any, failure: Callable[[], str | None]) -> None:
        self._observer = observer

    def serve(self, requests: Sequence[Request]) -> float:
        for request in requests:
            for _ in range(self.tokens_each):
                self._observer.token(request.id, 1.0)
            self._observer.ended(completion(request, self.finish_reason), ())
        return 1.5


def completion(request: Request, finish_reason: str) -> Completion:
    return Completion(
        id=request.id,
        prompt_tokens=1,
        tokens=(7, 8),
        text="",
        finish_reason=finish_reason,
        arrival_s=0.0,
        first_token_s=0.5,
        end_s=1.0,
        error="w0 said so" if finish_reason == "error" else None,
    )


class Rig:
    """A bench whose workers report what a test wants, look by look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: Sequence[Sequence[str]]) -> None:
        self.clock = VirtualClock(100.0)
        self.told: list[object] = []
        self.num_looks = 0
        self.shares: list[float] = []
        cluster: Any = SimpleNamespace(
            links=SimpleNamespace(every_worker=self.told.append), failure=SimpleNamespace(reason=None)
        )
        plan: Any = SimpleNamespace(epoch=1, timeout_s=TIMEOUT_S)

        def collect(*_: object) -> tuple[dict[str, object], dict[str, list[Span]]]:
            names = looks[min(self.num_looks, len(looks) - 1)]
            self.num_looks += 1
            spans = [Span(name, "stream", 100.0, 0.001, {"of": "step", "transfers": 1}) for name in names]
            return {}, {"w0": [Span("stream_out", "stream", 99.0, 0.1, {}), *spans]}

        monkeypatch.setattr(streaming_batch, "collect", collect)
        monkeypatch.setattr(streaming_batch, "Controller", FakeController)
        self.bench = Bench(cluster, plan, self.clock, self.shares.append)


def test_a_batch_is_served_at_its_level_and_counts_its_own_spans_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, [["stream_out", "flush"]])
    served = rig.bench.serve("naive", REQUESTS)
    assert rig.told == [m.SetStreaming(epoch=1, level=StreamingLevel.naive)]  # type: ignore[arg-type]
    assert served.latency_s == 1.5
    assert served.answers == {"a": (7, 8), "b": (7, 8)}
    assert served.times.step_transfers == 1
    assert rig.shares[0] == 0.25


def test_a_batch_is_over_when_every_transfer_has_left_in_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    done = ["stream_out", "flush"]
    rig = Rig(monkeypatch, [["stream_out"], done, [*done, "stream_out"], done * 2, done * 2])
    rig.bench.serve("full", REQUESTS)
    assert rig.num_looks == 5


def test_streaming_that_does_not_end_is_an_error_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, [["stream_out"]])
    with pytest.raises(DejavuError, match="level full: 1 of 1 transfers had not left"):
        rig.bench.serve("full", REQUESTS)


def test_a_request_that_failed_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, [[]])
    monkeypatch.setattr(FakeController, "finish_reason", "error")
    with pytest.raises(DejavuError, match="level off: request a failed: w0 said so"):
        rig.bench.serve("off", REQUESTS)


def test_a_request_that_was_computed_twice_is_an_error_for_its_latency_is_not_the_levels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, [[]])
    monkeypatch.setattr(FakeController, "tokens_each", 3)
    with pytest.raises(DejavuError, match="6 tokens came where 4 are asked for"):
        rig.bench.serve("off", REQUESTS)


def test_other_tokens_than_offs_are_an_error_that_names_the_first_one() -> None:
    expected = {RequestId("a"): (1, 2, 3), RequestId("b"): (4, 5, 6)}
    check_same("tiny", "full", expected, dict(expected))
    with pytest.raises(DejavuError, match=r"tiny, streaming at level full: request b differs .* token 1 on"):
        check_same("tiny", "full", expected, {**expected, RequestId("b"): (4, 9, 6)})
    with pytest.raises(DejavuError, match="token 2 on"):
        check_same("tiny", "full", expected, {**expected, RequestId("a"): (1, 2)})


def test_every_level_comes_at_every_place_once_in_as_many_rounds() -> None:
    levels = ("off", "naive", "full")
    orders = [streaming._rotated(levels, index) for index in range(3)]
    assert orders[0] == list(levels)
    assert all(sorted(places) == sorted(levels) for places in [*orders, *zip(*orders, strict=True)])


def test_a_case_is_a_plan_for_each_model_and_destination_with_just_enough_positions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DEJAVU_CACHE", str(tmp_path))
    config = configured(
        "experiment=fig27",
        "measurement.models=[tiny-opt,tiny-gpt2]",
        "workload.prompt_tokens=8",
        "workload.max_tokens=6",
    )
    cases = prepare_cases(config, SilentProgress())
    assert [case.label for case in cases] == ["tiny-opt-memory", "tiny-opt-disk", "tiny-gpt2-memory", "tiny-gpt2-disk"]
    assert {case.plan.model.max_length for case in cases} == {14}
    assert [len(case.plan.workers) for case in cases] == [2, 1, 2, 1]
    assert {(case.plan.token_pipeline.num_rows, case.plan.prompt_rows) for case in cases} == {(8, 8)}
    assert cases[0].num_batches == 3 * (1 + 5 * 2)
    assert {len(request.prompt_tokens) for request in cases[0].requests} == {8}


def test_the_bar_counts_batches_and_the_part_of_the_one_under_way() -> None:
    told: list[tuple[float, int, str]] = []

    class Told(SilentProgress):
        def batches(self, done: float, total: int, what: str) -> None:
            told.append((done, total, what))

    bar = BatchBar(LabelledProgress(Told(), "case"), 2)
    bar.begin("first")
    bar.part(0.5)
    bar.end()
    bar.begin("second")
    assert told == [(0.0, 2, "first"), (0.5, 2, "first"), (1, 2, "first"), (1.0, 2, "second")]


def test_phases_of_one_cluster_bear_its_label_so_that_the_next_ones_are_shown_too() -> None:
    told: list[str] = []

    class Told(SilentProgress):
        def phase(self, description: str, done: float, total: float | None, unit: str = "items") -> None:
            told.append(description)

        def note(self, text: str) -> None:
            told.append(text)

    labelled = LabelledProgress(Told(), "tiny-disk")
    labelled.phase("workers ready", 1, 2)
    labelled.note("store: here")
    labelled.close()
    assert told == ["tiny-disk: workers ready", "tiny-disk: store: here"]
