"""The figures of a load: rates, latencies, goodput, and what is the client's own."""

from __future__ import annotations

import io

from rich.console import Console

from dejavu.report.load import Limits, Sample, load_report
from dejavu.report.load_table import render_load

SAMPLES = (
    Sample(id="a", due_s=0.0, sent_s=0.5, end_s=2.5, prompt_tokens=10, output_tokens=3, chunk_times_s=(1.5, 2.0, 2.5)),
    Sample(id="b", due_s=1.0, sent_s=1.0, end_s=4.5, prompt_tokens=20, output_tokens=1, chunk_times_s=(4.0,)),
    Sample(id="c", due_s=3.0, sent_s=3.0, end_s=3.5, error="http 429", detail="the queue is full"),
)


def report(*samples: Sample, limits: Limits | None = None) -> dict[str, object]:
    return dict(load_report(samples, limits or Limits(), endpoint="http://e/v1", model="m", began="today"))


def test_counts_add_up_and_errors_are_told_by_kind() -> None:
    assert report(*SAMPLES)["requests"] == {
        "sent": 3,
        "finished": 2,
        "failed": 1,
        "errors": {"http 429": 1},
        "details": {"http 429": "the queue is full"},
    }


def test_rates_are_those_of_finished_requests_from_the_first_sending_to_the_last_end() -> None:
    made = report(*SAMPLES)
    assert made["duration_s"] == 4.0
    assert made["throughput"] == {"requests_per_s": 0.5, "output_tokens_per_s": 1.0, "total_tokens_per_s": 8.5}


def test_the_clients_lateness_is_no_part_of_a_latency() -> None:
    made = load_report(SAMPLES[:1], Limits(), endpoint="e", model="m", began="")
    assert made["client"]["lateness_s"]["max"] == 0.5
    assert made["latency"]["time_to_first_token_s"]["max"] == 1.0
    assert made["latency"]["end_to_end_s"]["max"] == 2.0


def test_an_answer_of_one_token_has_no_time_per_later_token() -> None:
    made = load_report(SAMPLES, Limits(), endpoint="e", model="m", began="")
    latency = made["latency"]
    assert latency["time_per_output_token_s"]["mean"] == 0.5
    assert latency["inter_token_s"] == {"mean": 0.5, "p50": 0.5, "p95": 0.5, "p99": 0.5, "max": 0.5}


def test_goodput_counts_whole_answers_within_every_limit_and_shares_are_of_all_sent() -> None:
    made = load_report(SAMPLES, Limits(ttft_s=2.0, tpot_s=0.5), endpoint="e", model="m", began="")
    assert made["goodput"] is not None
    assert (made["goodput"]["requests"], made["goodput"]["share"]) == (1, 1 / 3)
    assert made["goodput"]["requests_per_s"] == 0.25
    assert report(*SAMPLES)["goodput"] is None


def test_the_most_under_way_is_counted_by_beginnings_and_ends() -> None:
    assert load_report(SAMPLES, Limits(), endpoint="e", model="m", began="")["client"]["most_under_way"] == 2


def test_the_table_tells_the_figures_and_the_errors() -> None:
    console = Console(file=io.StringIO(), width=120)
    limits = Limits(ttft_s=2.0)
    render_load(console, load_report(SAMPLES, limits, endpoint="http://e/v1", model="m", began="today"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 of 3 finished in 4.00 s, at most 2 at a time" in text
    assert "1 × http 429: the queue is full" in text
    assert "1.00 output tokens/s" in text
    assert "33 % of the requests within TTFT ≤ 2.00 s" in text


def test_a_load_without_an_answer_has_figures_too() -> None:
    console = Console(file=io.StringIO(), width=120)
    made = load_report(SAMPLES[2:], Limits(ttft_s=1.0), endpoint="e", model="m", began="")
    render_load(console, made)
    assert made["throughput"]["output_tokens_per_s"] == 0.0
    assert load_report((), Limits(), endpoint="e", model="m", began="")["duration_s"] == 0.0
