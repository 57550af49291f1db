"""``workflow=plan`` from the declaration to ``plan.json``, and as a command."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dejavu.cli.arguments import read_arguments
from dejavu.cli.composer import Composer, composer, declaration
from dejavu.config import SHAPE_KINDS, Config, load, validate
from dejavu.errors import ConfigError, InfeasibleError
from dejavu.planning import search
from dejavu.planning.document import document
from dejavu.workflows import plan

ROOT = Path(__file__).parents[2]
OPT_66B = [
    "workflow=plan",
    "model=opt-66b",
    "workload=synthetic",
    "workload.prompt_tokens=1000",
    "workload.max_tokens=200",
    "strategy.microbatch.token=8",
    "profile=given",
    "profile.prompt_time_s=1.307",
    "profile.token_time_s=0.035",
    "cluster.num_machines=4",
    "cluster.device_memory_gb=80",
    "cluster.devices_per_machine=2",
]
CHAT = ["workload=chat", "workload.prompt_tokens=null"]


@pytest.fixture(scope="module")
def hydra() -> Iterator[Composer]:
    with composer(read_arguments([])) as made:
        yield made


def declared(hydra: Composer, *overrides: str) -> Config:
    config = load(declaration(hydra.compose([*OPT_66B, *overrides])), Path("/start"))
    validate(config)
    return config


def planned(hydra: Composer, folder: Path, *overrides: str) -> dict[str, Any]:
    plan.run(declared(hydra, *overrides), folder)
    found: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return found


def test_plan_json_has_the_decision_the_formulas_and_their_inputs(
    hydra: Composer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(hydra, tmp_path, "profile.prompt_time_s=5", "cluster.price_per_hour=10")
    assert (found["mode"], found["split"], found["feasible"]) == ("disaggregated", {"prompt": 2, "token": 2}, True)
    assert found["reason"].startswith("disaggregate:")
    # Rows are replaced at once, so that one microbatch a token stage is enough.
    assert (found["in_flight"], found["max_length"]) == (2, 1200)
    formulas, inputs = found["formulas"], found["formulas"]["inputs"]
    assert formulas["I_c"] == pytest.approx(3 * (5 - 0.035) / 4 + 5 + 200 * 0.035)
    assert formulas["I_p"] == pytest.approx(4 * 5 / 2)
    assert formulas["I_t"] == pytest.approx(4 * 200 * 0.035 / 2)
    assert formulas["ratio"] == pytest.approx(5 / 0.035)
    assert formulas["threshold"] == pytest.approx(1)
    kv_bytes = 2 * 9216 * 2
    assert inputs["C0"] == 8 * 1000 * kv_bytes
    assert inputs["K0"] == 8 * 200 * kv_bytes
    assert inputs["M"] == 160 * 10**9
    assert (inputs["D"], inputs["L"], inputs["N"], inputs["m"]) == (4, 64, 200, 1)
    assert formulas["min_prompt_depth"] == math.ceil(64 * (inputs["C0"] + inputs["W0"]) / inputs["M"])
    left = inputs["M"] - 64 * (inputs["C0"] + inputs["K0"])
    assert formulas["min_token_depth"] == math.ceil(64 * inputs["W0"] / left)
    assert [stage["layers"] for stage in found["memory"]] == [[0, 32], [32, 64]] * 2
    assert found["cost"]["per_hour"] == 40
    assert found["runners_up"][0]["mode"] == "colocated"
    assert found["inputs"]["profile"]["kind"] == "given"
    shown = capsys.readouterr().out
    assert "Disaggregated: prompts on 2 machines, tokens on 2 machines" in shown
    assert "Runners-up" in shown


def test_rows_longer_than_any_request_that_would_not_fit_are_warned_of(hydra: Composer, tmp_path: Path) -> None:
    tight = ("cluster.device_memory_gb=30", "strategy.microbatch.token=8")
    found = planned(hydra, tmp_path, *tight)
    assert found["feasible"]
    assert any("model.max_length=1200" in warning and "2048" in warning for warning in found["warnings"])
    assert not any("2048" in warning for warning in planned(hydra, tmp_path, "cluster.device_memory_gb=80")["warnings"])


def test_not_to_disaggregate_is_an_answer(hydra: Composer, tmp_path: Path) -> None:
    found = planned(hydra, tmp_path)
    assert (found["mode"], found["split"], found["stages"], found["feasible"]) == ("colocated", None, 4, True)
    assert found["reason"].startswith("do not disaggregate")


def test_an_infeasible_plan_is_written_with_its_numbers_and_raised(hydra: Composer, tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError, match="infeasible because") as caught:
        planned(hydra, tmp_path, "cluster.device_memory_gb=16")
    found = json.loads((tmp_path / "plan.json").read_text())
    assert (found["feasible"], found["mode"], found["split"]) == (False, None, None)
    assert found["reason"] == str(caught.value)
    assert len(found["reason"].splitlines()) <= 3


def test_the_planner_chooses_the_rows_where_the_strategy_is_left_to_it(hydra: Composer, tmp_path: Path) -> None:
    auto = ("strategy=auto", "workload.num_requests=1000", "cluster.device_memory_gb=50")
    found = planned(hydra, tmp_path, *auto, "strategy.microbatch.token=32")
    rows = found["microbatch"]["token"]
    assert 1 <= rows < 32
    assert found["inputs"]["microbatch"] == rows
    # As many fit and twice as many do not, or they would be faster.
    with pytest.raises(InfeasibleError):
        planned(hydra, tmp_path, *auto[1:], f"strategy.microbatch.token={2 * rows}")


def test_no_tokens_at_all_can_be_asked_for(hydra: Composer, tmp_path: Path) -> None:
    assert planned(hydra, tmp_path, "workload.max_tokens=0")["formulas"]["inputs"]["N"] == 0


def test_lengths_of_a_trace_decide_by_their_means_and_the_memory_by_their_maxima(
    hydra: Composer, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,100,10\n2023-11-16 18:00:01,300,31\n"
        "2023-11-16 18:00:02,300,0\n"
    )
    found = planned(hydra, tmp_path, "workload=trace", f"workload.path={trace}")
    inputs = found["formulas"]["inputs"]
    assert inputs["N"] == 20.5
    assert inputs["C0"] == 8 * 300 * 2 * 9216 * 2
    assert inputs["K0"] == 8 * 31 * 2 * 9216 * 2
    assert found["inputs"]["workload"]["num_requests"] == 2


# Parameters in billions as published with the models.
@pytest.mark.parametrize(
    ("kind", "billions"),
    [
        ("gpt2-1.5b", 1.56),
        ("opt-13b", 12.85),
        ("opt-30b", 29.97),
        ("opt-66b", 65.72),
        ("bloom-176b", 176.25),
        ("llama2-70b", 68.98),
        ("llama3-8b", 8.03),
        ("qwen2.5-72b", 72.71),
    ],
)
def test_a_published_models_sizes_give_its_number_of_parameters(hydra: Composer, kind: str, billions: float) -> None:
    shape, _ = plan.model_shape(declared(hydra, f"model={kind}"))
    # A tied head is held twice, by the first and by the last stage.
    twice = 0 if kind.startswith(("llama", "qwen")) else shape.vocab_size * shape.hidden_size
    assert (shape.num_parameters - twice) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize("kind", [kind for kind in SHAPE_KINDS if kind != "shape"])
def test_a_model_without_weights_is_refused_where_one_would_run(hydra: Composer, kind: str) -> None:
    config = load(declaration(hydra.compose([f"model={kind}"])), Path("/start"))
    with pytest.raises(ConfigError, match=rf"model={kind} is sizes without weights") as caught:
        validate(config)
    assert "workflow=generate" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_text_workload_is_refused_for_a_model_without_a_tokenizer(hydra: Composer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sizes without a tokenizer") as caught:
        planned(hydra, tmp_path, *CHAT)
    assert "workload=lmsys-like" in str(caught.value)


def test_a_model_that_runs_is_planned_for_by_its_own_sizes(
    hydra: Composer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEJAVU_CACHE", str(tmp_path))
    found = planned(hydra, tmp_path, "model=tiny-llama", "model.num_kv_heads=2", *CHAT)
    assert found["formulas"]["inputs"]["L"] == 6
    assert found["inputs"]["model"]["num_kv_heads"] == 2


def command(directory: Path, *overrides: str, flags: Sequence[str] = ()) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, *flags, "-m", "dejavu.run", *OPT_66B, "hydra.run.dir=out", *overrides],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in ended.stdout + ended.stderr
    assert "nan" not in ended.stdout.lower()
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "code", "words", "flags"),
    [
        (["profile.prompt_time_s=5"], 0, "disaggregate: ", ()),
        (["profile.prompt_time_s=0", "profile.token_time_s=0"], 0, "do not disaggregate", ("-O",)),
        (["cluster.device_memory_gb=0.5"], 3, "infeasible because", ("-O",)),
        (["profile.token_time_s=nan"], 2, "profile.token_time_s", ("-O",)),
    ],
)
def test_b32_the_command_ends_with_the_right_code_also_under_o(
    tmp_path: Path, overrides: list[str], code: int, words: str, flags: Sequence[str]
) -> None:
    returned, shown = command(tmp_path, *overrides, flags=flags)
    assert returned == code
    assert words in " ".join(shown.split())
    assert (tmp_path / "out" / "plan.json").is_file() == (code != 2)


def test_b32_every_corner_of_the_declaration_is_answered(hydra: Composer) -> None:
    corners = itertools.product((1, 8), (0.01, 30, 80), (0, 2.5), (0, 1e-4, 0.5), (0, 200), (1, 1.5))
    config = declared(hydra)
    for machines, memory_gb, prompt_s, token_s, new_tokens, overhead in corners:
        config.cluster.num_machines, config.cluster.device_memory_gb = machines, memory_gb
        config.profile.prompt_time_s, config.profile.token_time_s = prompt_s, token_s
        config.profile.streaming_overhead, config.workload.max_tokens = overhead, new_tokens
        validate(config)
        answer = search.plan(plan.question(config))
        found = msgspec.to_builtins(document(answer))
        text = json.dumps(found)
        assert "NaN" not in text
        assert "Infinity" not in text
        assert found["feasible"] == (answer.chosen is not None)
        assert found["reason"].startswith(
            "disaggregate:" if found["split"] else ("infeasible because", "do not disaggregate")
        )
        if found["mode"] == "disaggregated":
            assert found["split"]["prompt"] + found["split"]["token"] == machines
            assert min(found["split"].values()) >= 1
