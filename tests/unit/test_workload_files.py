"""The user's prompt lines and traces: what is well formed becomes requests, what is not is told with its line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from dejavu.config import WorkloadConfig, WorkloadKind
from dejavu.errors import ConfigError
from dejavu.request import Request, Sampling
from dejavu.workload import Message, check, load


class LetterCodec:
    """A token a character; a chat begins with token 1 and ends with token 2."""

    vocab_size = 1000

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return [1, *(ord(letter) for message in messages for letter in message["content"]), 2]


def lines_file(tmp_path: Path, *lines: object) -> WorkloadConfig:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return WorkloadConfig(kind=WorkloadKind.file, path=str(path), max_tokens=16)


def requests(workload: WorkloadConfig) -> list[Request]:
    check(workload)
    return load(workload, codec=LetterCodec())


def refusal(workload: WorkloadConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check(workload)
    assert len(str(caught.value).splitlines()) <= 3
    with pytest.raises(ConfigError):
        load(workload, codec=LetterCodec())
    return str(caught.value)


def test_the_three_forms_of_a_prompt_become_token_ids(tmp_path: Path) -> None:
    text, chat, tokens = requests(
        lines_file(
            tmp_path,
            {"prompt": "ab"},
            {"messages": [{"role": "system", "content": "c"}, {"role": "user", "content": "d"}]},
            {"prompt_tokens": [7, 8]},
        )
    )
    assert text.prompt_tokens == (97, 98)
    assert chat.prompt_tokens == (1, 99, 100, 2)
    assert chat.prompt_text == "d"
    assert tokens.prompt_tokens == (7, 8)
    assert tokens.prompt_text is None


def test_a_line_has_the_last_word_over_the_workloads_defaults(tmp_path: Path) -> None:
    workload = lines_file(
        tmp_path,
        {"prompt": "a", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 5, "stop": ["x", ""],
         "ignore_eos": False, "id": 12},
        {"prompt": "a", "stop": "y"},
    )  # fmt: skip
    workload.ignore_eos, workload.seed = True, 9
    own, default = requests(workload)
    assert own.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=4, seed=5)
    assert (own.id, own.max_tokens, own.stop, own.ignore_eos) == ("12", 3, ("x",), False)
    assert default.sampling == Sampling(seed=9)
    assert (default.id, default.max_tokens, default.stop, default.ignore_eos) == ("line-2", 16, ("y",), True)


@pytest.mark.parametrize(
    "line", [{"prompt": ""}, {"prompt_tokens": []}, {"messages": []}, {"messages": [{"role": "user", "content": " "}]}]
)
def test_an_empty_prompt_is_a_refused_request_and_no_fault_of_the_file(tmp_path: Path, line: object) -> None:
    empty, other = requests(lines_file(tmp_path, line, {"prompt": "a"}))
    assert empty.refusal == "the prompt is empty"
    assert other.refusal is None


def test_a_token_id_beyond_the_vocabulary_is_a_refused_request(tmp_path: Path) -> None:
    (request,) = requests(lines_file(tmp_path, {"prompt_tokens": [3, 1000]}))
    assert request.refusal == "token id 1000 is not in the vocabulary of 1000"


def test_token_ids_need_no_tokenizer_and_texts_do(tmp_path: Path) -> None:
    assert load(lines_file(tmp_path, {"prompt_tokens": [3]}), codec=None, vocab_size=10)[0].prompt_tokens == (3,)
    with pytest.raises(ConfigError, match=r":1: .*no tokenizer"):
        load(lines_file(tmp_path, {"prompt": "a"}), codec=None, vocab_size=10)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not a JSON object"),
        ("[1]", "object"),
        ({"promt": "a"}, "did you mean 'prompt'"),
        ({"prompt": "a", "max_token": 3}, "did you mean 'max_tokens'"),
        ({"messages": [{"role": "user", "contents": "a"}]}, "did you mean 'content'"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "usr"),
        ({"prompt": "a", "prompt_tokens": [1]}, "prompt and prompt_tokens"),
        ({"max_tokens": 3}, "exactly one of"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "3"}, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "seed": -1}, "seed"),
        ({"prompt_tokens": [-1]}, "prompt_tokens"),
        ({"prompt_tokens": ["a"]}, "prompt_tokens"),
    ],
)
def test_a_malformed_line_is_refused_with_path_and_line(tmp_path: Path, line: object, words: str) -> None:
    workload = lines_file(tmp_path, {"prompt": "fine"}, "", line)
    message = refusal(workload)
    assert f"{workload.path}:3: " in message
    assert words in message


def test_an_id_that_comes_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    message = refusal(lines_file(tmp_path, {"prompt": "a", "id": "x"}, {"prompt": "b"}, {"prompt": "c", "id": "x"}))
    assert ":3: id 'x'" in message
    assert "line 1" in message


def test_a_file_without_a_request_is_refused(tmp_path: Path) -> None:
    assert "holds no request" in refusal(lines_file(tmp_path, "", ""))


def test_a_file_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    workload = lines_file(tmp_path, {"prompt": "a"})
    Path(str(workload.path)).write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert ":2: is not UTF-8" in refusal(workload)


def test_a_missing_file_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    lines_file(tmp_path, {"prompt": "a"})
    message = refusal(WorkloadConfig(kind=WorkloadKind.file, path=str(tmp_path / "prompt.jsonl"), max_tokens=1))
    assert "workload.path" in message
    assert "'prompts.jsonl'" in message


def test_only_the_first_requests_are_read_when_a_number_is_given(tmp_path: Path) -> None:
    workload = lines_file(tmp_path, {"prompt": "a"}, {"prompt": "b"}, "broken")
    workload.num_requests = 2
    assert len(requests(workload)) == 2


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:51.2224670,0,55
"""


def trace(tmp_path: Path, name: str, text: str) -> WorkloadConfig:
    (tmp_path / name).write_text(text)
    return WorkloadConfig(kind=WorkloadKind.trace, path=str(tmp_path / name), rate=None)


def test_an_azure_trace_gives_lengths_and_times_from_its_first_entry(tmp_path: Path) -> None:
    first, second, empty = requests(trace(tmp_path, "azure.csv", AZURE))
    assert (len(first.prompt_tokens), first.max_tokens, first.arrival_s) == (374, 44, 0.0)
    assert (len(second.prompt_tokens), second.max_tokens) == (396, 109)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)
    assert empty.arrival_s == pytest.approx(64.541877, abs=1e-6)
    assert empty.refusal == "the prompt is empty"


def test_a_mooncake_trace_gives_lengths_and_times_in_milliseconds(tmp_path: Path) -> None:
    text = (
        '{"timestamp": 500, "input_length": 20, "output_length": 5, "hash_ids": [0]}\n'
        '{"timestamp": 3500, "input_length": 30, "output_length": 6, "hash_ids": []}\n'
    )
    first, second = requests(trace(tmp_path, "mooncake.jsonl", text))
    assert (len(first.prompt_tokens), first.max_tokens, first.arrival_s) == (20, 5, 0.0)
    assert (len(second.prompt_tokens), second.max_tokens, second.arrival_s) == (30, 6, 3.0)


def test_a_traces_lengths_can_be_capped_and_its_times_replaced(tmp_path: Path) -> None:
    workload = trace(tmp_path, "azure.csv", AZURE)
    workload.prompt_tokens, workload.max_tokens, workload.rate, workload.num_requests = 10, 4, 0.0, 2
    found = requests(workload)
    assert [(len(request.prompt_tokens), request.max_tokens, request.arrival_s) for request in found] == [
        (10, 4, 0)
    ] * 2


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.csv", "TIMESTAMP,ContextToken,GeneratedTokens\n", ":1: has no column ContextTokens\ndid you mean"),
        ("t.csv", "", ":1: has no column"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ("t.csv", AZURE + "yesterday,1,2\n", ":5: "),
        ("t.csv", AZURE + "2023-11-16 18:15:46,many,2\n", ":5: "),
        ("t.csv", AZURE + "2023-11-16 18:15:46,-1,2\n", ":5: a length is negative"),
        ("t.csv", AZURE + "2023-11-16 18:15:46,1\n", ":5: has 2 fields"),
        ("t.jsonl", '{"timestamp": 1, "input_length": 2}\n', ":1: "),
        ("t.jsonl", "{\n", ":1: "),
        ("t.txt", AZURE, ".csv"),
    ],
)  # fmt: skip
def test_a_malformed_trace_is_refused_with_its_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    assert words in refusal(trace(tmp_path, name, text))
