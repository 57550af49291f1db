"""The final report: a person finds every essential in it, at any width, and nothing in it steers the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dejavu.ids import RequestId
from dejavu.report.amounts import printable, show_bytes, show_count, show_rate, show_seconds, show_share
from dejavu.report.counters import WorkerCounters
from dejavu.report.metrics import summarize
from dejavu.report.tables import StageRow, render_report
from dejavu.request import Completion

REASON = "the prompt has 5000 tokens and max_tokens is 64, more than the 2048 positions of model.max_length"


def answer(name: str, text: str, *, reason: str = "stop", error: str | None = None, resumed: int = 0) -> Completion:
    return Completion(
        id=RequestId(name),
        prompt_tokens=12,
        tokens=() if error else (1, 2, 3),
        text=text,
        finish_reason=reason,
        arrival_s=0.0,
        first_token_s=None if error else 0.25,
        end_s=1.0,
        error=error,
        resumed=resumed,
        prompt=f"Question {name}?",
    )


WORKERS = {
    name: WorkerCounters(
        name=name,
        pipeline=pipeline,
        stage=stage,
        layers=layers,
        compute_s=3.0,
        window_s=4.0,
        stream_bytes=12_300_000,
        stream_hidden_s=0.9,
        stream_exposed_s=0.1,
        kv={"accepted": 9, "corrupt": 1},
        peak_rss_bytes=612_000_000,
        weight_bytes=269_000_000,
        kv_pool_bytes=31_000_000,
    )
    for name, pipeline, stage, layers in (
        ("w2", "token", 1, (17, 30)),
        ("w1", "token", 0, (0, 17)),
        ("w0", "prompt", 0, (0, 30)),
    )
}


def report(completions: list[Completion], *, width: int = 80, workers: dict[str, WorkerCounters] | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    counted = WORKERS if workers is None else workers
    rows = [StageRow.of(worker) for worker in counted.values()]
    render_report(console, rows, completions, summarize(completions, {}, counted, 2.0))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [80, 120])
def test_report_shows_answers_stages_and_figures_without_cutting_them(width: int) -> None:
    long_answer = "The sky is blue since air scatters short waves more than long ones. " * 5
    shown = report([answer("q1", long_answer), answer("q2", "Paris.", resumed=2)], width=width)
    assert max(map(len, shown.splitlines())) <= width
    assert words(long_answer) in words(shown)
    for essential in (
        "q1 Question q1?",
        "3 tokens, stop",
        "resumed 2×",
        "Disaggregated: prompts on 1 stage, tokens on 2 stages",
        "75 %",
        "269 MB",
        "31.0 MB",
        "612 MB",
        "0–16",
        "17–29",
        "2 of 2 finished, 1 resumed after a repair",
        "6 generated, 24 of prompts",
        "3.00 tokens/s",
        "36.9 MB, 90 % of its time hidden under computation",
        "3 corrupt chunks dropped",
    ):
        assert essential in words(shown), essential


def test_stages_come_in_the_order_of_the_pipelines() -> None:
    lines = [line.split() for line in report([]).splitlines()]
    stages = [tuple(line[:3]) for line in lines if line and line[0] in {"prompt", "token"}]
    assert stages == [("prompt", "0", "w0"), ("token", "0", "w1"), ("token", "1", "w2")]


def test_report_that_is_piped_has_no_colour() -> None:
    assert "\x1b" not in report([answer("q1", "yes"), answer("q2", "", reason="error", error=REASON)])


def test_failed_request_is_red_with_its_whole_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    completions = [answer("q1", "", reason="error", error=REASON)]
    assert REASON in words(report(completions))
    assert "0 of 1 finished, 1 failed" in report(completions)
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="standard", no_color=False)
    render_report(console, [], completions, summarize(completions, {}, {}, 1.0))
    assert isinstance(console.file, io.StringIO)
    assert f"\x1b[31m{REASON}" in console.file.getvalue()


def test_answer_cannot_steer_the_terminal_or_the_markup() -> None:
    shown = report([answer("q1", "a\x1b[2J [bold]b[/bold] [/]\x07")])
    assert "a�[2J [bold]b[/bold] [/]�" in shown


def test_answers_beyond_the_limit_are_counted_and_errors_are_shown_all_the_same() -> None:
    completions = [answer(f"q{number}", "yes") for number in range(25)]
    completions.append(answer("bad", "", reason="error", error=REASON))
    shown = report(completions)
    assert "q19 " in shown
    assert "q20 " not in shown
    assert "and 5 more answers in completions.jsonl" in shown
    assert REASON in words(shown)


def test_very_long_id_is_shown_whole() -> None:
    name = "user-" + "0123456789" * 9
    shown = report([answer(name, "yes")])
    assert max(map(len, shown.splitlines())) <= 80
    head = shown[shown.index("user-") : shown.index("  yes")]
    assert name in "".join(line.split()[0] for line in head.splitlines() if line.strip())


def test_report_of_a_run_without_requests_says_so() -> None:
    shown = report([], workers={})
    assert "No request was answered." in shown
    assert "0 of 0 finished" in shown
    assert "first token" not in shown


def test_colocated_plan_is_named_so_and_what_is_unmeasured_is_a_dash() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    row = StageRow(pipeline="colocated", stage=0, worker="w0", layers=(4, 5))
    render_report(console, [row], [], summarize([], {}, {}, 0.0))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "Colocated: prompts and tokens on 1 stage" in shown
    assert "colocated 0 w0 4 – – – –" in words(shown)


def test_answer_without_a_known_prompt_or_text_is_still_a_block() -> None:
    completion = Completion(
        id=RequestId("s0"),
        prompt_tokens=512,
        tokens=(7,),
        text="",
        finish_reason="length",
        arrival_s=0.0,
        first_token_s=0.1,
        end_s=0.1,
    )
    shown = report([completion])
    assert "(prompt of 512 tokens)" in shown
    assert "1 token, length" in shown
    assert "(no text)" in shown


def test_amounts_read_well() -> None:
    assert [show_bytes(number) for number in (None, 0, 999, 1000, 98_100_000, 1.5e9)] == [
        "–",
        "0 B",
        "999 B",
        "1.00 kB",
        "98.1 MB",
        "1.50 GB",
    ]
    assert [show_seconds(number) for number in (None, 0.0, 0.0123, 4.56, 185.2)] == [
        "–",
        "0 s",
        "12.3 ms",
        "4.56 s",
        "3 min 05 s",
    ]
    assert (show_share(0.834), show_share(None)) == ("83 %", "–")
    assert (show_rate(1234.5, "tokens"), show_rate(None, "tokens")) == ("1,234 tokens/s", "–")
    assert (show_count(1, "token"), show_count(1234, "token")) == ("1 token", "1,234 tokens")
    assert printable("a\tb\r\nc\x00") == "a    b\nc�"
