"""The formats of traces, lines that are no requests, and lengths out of distributions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import fmean, median

import pytest

from dejavu.config import BadLines, WorkloadConfig, WorkloadKind
from dejavu.errors import ConfigError
from dejavu.workload import load, request_lengths
from dejavu.workload.synthetic import new_tokens
from dejavu.workload.traces import read_trace

PUBLIC = Path(os.environ.get("DEJAVU_TRACES", "no folder of public traces"))


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def lengths(path: Path) -> list[tuple[float, int, int]]:
    return [(one.arrival_s, one.prompt_tokens, one.output_tokens) for one in read_trace(path, None).entries]


def test_plain_columns_are_read_in_any_order_and_sorted_by_arrival(tmp_path: Path) -> None:
    text = "new_tokens, prompt_tokens ,arrival_s,user\n5,10,3.5,a\n6,20,1.5,b\n"
    assert lengths(written(tmp_path, "t.csv", text)) == [(0.0, 20, 6), (2.0, 10, 5)]
    assert lengths(written(tmp_path, "t.csv", "arrival,prompt,new\n0,1,2\n")) == [(0.0, 1, 2)]


def test_lengths_without_times_are_all_there_at_once(tmp_path: Path) -> None:
    text = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n290,905,1195,0.32\n"
    assert lengths(written(tmp_path, "t.csv", text)) == [(0.0, 74, 918), (0.0, 290, 905)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:04.2319600"),
        ("2024-05-10 00:00:00.979960+00:00", "2024-05-10 00:00:01.231960+00:00"),
        ("2024-05-10 23:59:59.979960Z", "2024-05-11 00:00:00.231960Z"),
    ],
)
def test_azures_traces_of_each_year_are_read(tmp_path: Path, first: str, second: str) -> None:
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n{first},374,44\n{second},396,109\n"
    (_, *one), (at_s, *other) = lengths(written(tmp_path, "t.csv", text))
    assert (one, other) == ([374, 44], [396, 109])
    assert at_s == pytest.approx(0.252, abs=1e-6)


def test_a_list_of_pairs_is_read(tmp_path: Path) -> None:
    assert lengths(written(tmp_path, "t.json", "[[1000, 20], [900, 3]]")) == [(0.0, 1000, 20), (0.0, 900, 3)]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.json", "{}", "is no list of pairs"),
        ("t.json", "[[1, 2]", "is no JSON"),
        ("t.json", "[[1, 2], [1]]", ":entry 1: "),
        ("t.json", "[[1, 2.5]]", ":entry 0: "),
        ("t.json", "[]", "holds no request"),
        ("t.csv", "arrival_s,prompt_tokens,new_token\n", "has no column new_tokens\ndid you mean 'new_token'"),
        ("t.csv", "arrival_s,prompt_tokens,new_tokens\nnan,1,2\n", ":2: its time is no number"),
        ("t.csv", "arrival_s,prompt_tokens,new_tokens\n0,1,99999999999\n", ":2: a length is beyond any model"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_with_its_place(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_trace(written(tmp_path, name, text), None)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


BROKEN = "arrival_s,prompt_tokens,new_tokens\n" + "0,1,2\n" + "x,1,2\n0,1\n" + "1,3,4\n" + "0,-1,2\n" * 5


def test_bad_lines_are_refused_unless_they_may_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r":3: .*\nworkload\.bad_lines=skip"):
        read_trace(written(tmp_path, "t.csv", BROKEN), None)


def test_bad_lines_that_are_left_out_are_counted_and_named(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "t.csv", BROKEN), None, skip_bad=True)
    assert len(trace.entries) == 2
    assert [one.place for one in trace.bad] == ["3", "4", "6", "7", "8", "9", "10"]
    assert trace.complaint is not None
    assert "7 of 9 entries are left out: 3: could not convert" in trace.complaint
    assert trace.complaint.endswith("and 2 more")
    assert read_trace(written(tmp_path, "good.csv", "arrival,prompt,new\n0,1,2\n"), None).complaint is None


def test_a_run_says_once_what_it_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, "t.csv", BROKEN)
    workload = WorkloadConfig(kind=WorkloadKind.trace, path=str(path), rate=None, bad_lines=BadLines.skip)
    assert len(load(workload, codec=None, vocab_size=10)) == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_lengths_are_those_of_the_requests_without_their_tokens(tmp_path: Path) -> None:
    pairs = [[5, 6], [7, 0], [300, 400]]
    workload = WorkloadConfig(
        kind=WorkloadKind.trace, path=str(written(tmp_path, "t.json", json.dumps(pairs))), prompt_tokens=200
    )
    assert [(one.prompt, one.new) for one in request_lengths(workload, None, 10)] == [(5, 6), (200, 400)]
    drawn = WorkloadConfig(
        kind=WorkloadKind.synthetic, num_requests=9, prompt_tokens=3, max_tokens=50, median_tokens=9, sigma=1
    )
    made = load(drawn, codec=None, vocab_size=10)
    found = request_lengths(drawn, None, 10)
    assert [(one.prompt, one.new) for one in found] == [(3, one.max_tokens) for one in made]


def test_a_workload_in_which_nothing_can_be_served_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "t.json", "[[0, 5]]")
    with pytest.raises(ConfigError, match="no request in it that can be served"):
        request_lengths(WorkloadConfig(kind=WorkloadKind.trace, path=str(path)), None, 10)


def test_lmsys_like_lengths_have_the_published_statistics() -> None:
    """vicuna-13b's answers: mean 177, median 140, 95th percentile 446, cut at 511."""
    drawn = new_tokens(20_000, 511, 140, 0.704, seed=1)
    assert median(drawn) == pytest.approx(140, rel=0.03)
    assert fmean(drawn) == pytest.approx(177, rel=0.06)
    assert sorted(drawn)[19_000] == pytest.approx(446, rel=0.05)
    assert max(drawn) == 511
    assert min(drawn) >= 1


def test_drawn_lengths_depend_on_the_seed_alone_and_a_longer_run_begins_like_a_shorter_one() -> None:
    assert new_tokens(50, 500, 100, 0.5, seed=3) == new_tokens(90, 500, 100, 0.5, seed=3)[:50]
    assert new_tokens(50, 500, 100, 0.5, seed=3) != new_tokens(50, 500, 100, 0.5, seed=4)
    assert new_tokens(4, 7, None, 0, seed=0) == [7] * 4


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="DEJAVU_TRACES names no folder with the public traces")
@pytest.mark.parametrize(
    ("name", "count", "mean_prompt"),
    [
        ("AzureLLMInferenceTrace_conv_2023.csv", 19_366, 1155),
        ("mooncake_conversation_trace.first5000.jsonl", 5000, None),
        ("sharegpt_8k_filtered_stats_llama2_tokenizer.csv", 30_731, None),
    ],
)
def test_public_traces_are_read_whole(name: str, count: int, mean_prompt: float | None) -> None:
    entries = read_trace(PUBLIC / name, None).entries
    assert len(entries) == count
    if mean_prompt is not None:
        assert fmean(one.prompt_tokens for one in entries) == pytest.approx(mean_prompt, rel=1e-2)
