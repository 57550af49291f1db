"""``workflow=profile``: which batches are served, what becomes of their spans, and once for real."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dejavu.config import Config, ProfilingConfig, WorkflowName, validate
from dejavu.errors import ConfigError, DejavuError
from dejavu.planning.profile_file import choose_measured, read_profile_file
from dejavu.planning.shape import shape_of_spec
from dejavu.planning.times import times_of_profile
from dejavu.report.progress import SilentProgress
from dejavu.report.spans import Span
from dejavu.request import Request
from dejavu.workflows import profile
from dejavu.workflows.preparation import prepare_model
from dejavu.workflows.streaming_case import BatchBar

from harness.cluster_kit import configured

PROFILING = ProfilingConfig(rows=[1, 3], prompt_tokens=[4, 8], steps=3, repeats=2)
SPEC: Any = SimpleNamespace(vocab_size=50, eos_token_ids=(0,))


class FakeWorker:
    """Takes 10 ms for each prompt token of the batch and 1 ms for each row of a step, and 5 ms between steps."""

    def __init__(self) -> None:
        self.served: list[tuple[int, int]] = []

    def __call__(self, requests: Sequence[Request]) -> Sequence[Span]:
        rows, tokens = len(requests), len(requests[0].prompt_tokens)
        self.served.append((rows, tokens))
        assert all(request.ignore_eos and 0 not in request.prompt_tokens for request in requests)
        spans = [Span("prompt", "compute", 1.0, rows * tokens * 0.01, {"rows": rows, "tokens": rows * tokens})]
        spans.append(Span("wait", "wait", 9.0, 1.0, {}))
        for index in range(requests[0].max_tokens - 1):
            spans.append(Span("step", "compute", 10 + index * (rows * 0.001 + 0.005), rows * 0.001, {"rows": rows}))
        return spans


def bar() -> BatchBar:
    return BatchBar(SilentProgress(), 100)


def test_every_point_is_measured_in_every_round_after_a_warm_up_of_each_size() -> None:
    worker = FakeWorker()
    samples = profile.measure(PROFILING, SPEC, bar(), worker)
    points = [(1, 4), (1, 8), (3, 4), (3, 8)]
    assert worker.served == [(1, 8), (3, 8), *points, *points]
    assert [(one.rows, one.tokens) for one in samples] == points
    last = samples[-1]
    assert last.prompts_s == pytest.approx([0.24] * 2)
    assert last.steps_s == pytest.approx([0.003] * 6)
    assert last.gaps_s == pytest.approx([0.005] * 4)


def test_rows_that_did_not_go_together_are_no_measurement() -> None:
    def torn(requests: Sequence[Request]) -> Sequence[Span]:
        return [Span("prompt", "compute", float(at), 1.0, {"rows": 1}) for at in range(len(requests))]

    with pytest.raises(DejavuError, match=r"3 rows were computed as \[1, 1, 1\]"):
        profile.measure(ProfilingConfig(rows=[3], prompt_tokens=[4], repeats=1), SPEC, bar(), torn)


def test_one_worker_has_the_whole_model_and_room_for_the_largest_microbatch() -> None:
    config = Config(profiling=PROFILING)
    alone = profile.one_worker(config)
    assert alone.strategy.depths == {"colocated": 1}
    assert (alone.strategy.microbatch.prompt, alone.strategy.microbatch.token) == (3, 3)
    assert alone.strategy.num_in_flight == 1
    assert alone.model.max_length == 8 + 3 + 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("rows", []), ("rows", [2, 2]), ("prompt_tokens", [0]), ("steps", 0), ("repeats", 0), ("neighbours", -1)],
)
def test_what_cannot_be_measured_is_refused(key: str, value: object) -> None:
    config = Config()
    config.workflow.name = WorkflowName.profile
    config.workload.max_tokens = 8
    validate(config)
    setattr(config.profiling, key, value)
    with pytest.raises(ConfigError, match=rf"profiling\.{key}"):
        validate(config)
    config.workflow.name = WorkflowName.generate
    with pytest.raises(ConfigError, match="profiling is for workflow=profile"):
        validate(config)


@pytest.mark.slow
def test_a_measured_profile_can_be_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configured(
        "workflow=profile",
        "model=tiny-llama",
        "profiling.rows=[1,4]",
        "profiling.prompt_tokens=[8,32]",
        "profiling.steps=4",
        "profiling.repeats=1",
        "profiling.neighbours=1",
    )
    profile.run(config, tmp_path)
    file = read_profile_file(tmp_path / "profile.json")
    spec = prepare_model(config.model, SilentProgress())
    chosen = choose_measured(file, tmp_path, shape=shape_of_spec("tiny-llama", spec), devices=1)
    assert chosen.model_hash == spec.model_hash
    assert [point[:2] for point in chosen.prompt_points] == [(1, 8), (1, 32), (4, 8), (4, 32)]
    assert [point[:2] for point in chosen.step_points] == [(1, 10), (1, 34), (4, 10), (4, 34)]
    costs = times_of_profile("measured", file, chosen).costs
    assert costs.prompt_time_s(2, 16) > 0
    assert costs.step_time_s(2, 16) > 0
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 5
    assert json.loads((tmp_path / "profile.json").read_text())["licence"]
    assert "profile=measured profile.path=" in capsys.readouterr().out
    assert "1 more worker(s) computing beside it" in file.source
    log = (tmp_path / "dejavu-neighbour-1" / "workers" / "w0.log").read_text()
    assert "ended" in log, "it is not left behind"
