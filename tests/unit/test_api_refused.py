"""What the HTTP interface refuses, and how it says so: by name, with limit and value, before it has cost much."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from harness.echo_service import EchoServer, echo_server


@pytest.fixture(scope="module")
def server() -> Iterator[EchoServer]:
    with echo_server() as made:
        yield made


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not supported; only 0 is"),
        ({"echo": True}, "echo", "not supported; only false is"),
        ({"n": 2}, "n", "n is 2"),
        ({"temperature": 2.5}, "temperature", "from 0 to 2"),
        ({"temperature": "hot"}, "temperature", "got `str`"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_k": -2}, "top_k", "at least -1"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"stop": [""]}, "stop", "empty"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "usage"),
        ({"prompt": ["A", "B"]}, "prompt", "2 entries"),
        ({"prompt": []}, None, "the prompt is empty"),
        ({"prompt": [999]}, None, "token id 999"),
        ({"prompt": [1] * 65}, "prompt", "prompt of 65 tokens exceeds the model's max_length 64"),
        ({"prompt": [[1] * 65]}, "prompt", "prompt of 65 tokens exceeds the model's max_length 64"),
        ({"prompt": [1, "A"]}, "prompt", "2 entries"),
        ({"seed": 2**70}, "seed", "must fit 64 bits"),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    server: EchoServer, fields: dict[str, object], param: str | None, words: str
) -> None:
    reply = server.post("/v1/completions", {"prompt": "ABC", "max_tokens": 5, **fields})
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] == param
    assert words in reply.error["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "~" * 6401, "content": "A"}],
        [{"role": "user", "name": "~" * 6401, "content": "A"}],
        [{"role": "user", "content": ""}] * 65,
    ],
)
def test_a_chat_that_cannot_fit_is_refused_before_it_is_tokenized(
    server: EchoServer, messages: list[dict[str, str]]
) -> None:
    reply = server.post("/v1/chat/completions", {"messages": messages})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert "max_length 64" in reply.error["message"]


def test_a_name_of_any_length_is_told_in_few_words(server: EchoServer) -> None:
    long = "temperature" * 100_000
    assert len(server.complete(**{long: 1}).body) < 1000
    assert len(server.complete(model=long).body) < 1000
    for message in ({"role": "user", "content": "A", long: 1}, {"role": "user", "content": [{"type": long}]}):
        reply = server.post("/v1/chat/completions", {"messages": [message]})
        assert (reply.status, len(reply.body) < 1000) == (400, True)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "only text"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs=true"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "max_tokens is 3"),
        ({"prompt": "A"}, "prompt", "unknown field"),
    ],
)
def test_a_wrong_field_of_a_chat_is_refused_by_name(
    server: EchoServer, fields: dict[str, object], param: str, words: str
) -> None:
    reply = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "A"}], **fields})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert words in reply.error["message"]


@pytest.mark.parametrize("length", [64, 65, 640])
def test_a_prompt_that_is_too_long_is_refused_with_limit_and_value(server: EchoServer, length: int) -> None:
    """Field report B14."""
    for reply in (server.complete("A" * length), server.chat("A" * length, max_tokens=None)):
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert f"prompt of {length} tokens" in reply.error["message"]
        assert "max_length 64" in reply.error["message"]
    assert server.complete().status == 200


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(server: EchoServer) -> None:
    untokenizable = "~" * 6401
    for reply in (server.complete(untokenizable), server.chat(untokenizable)):
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert "6401 characters" in reply.error["message"]
        assert "max_length 64" in reply.error["message"]


@pytest.mark.parametrize(
    ("body", "words"), [(b"{", "not JSON"), (b"[]", "must be a JSON object"), (b"\xff", "not JSON"), (b"", "not JSON")]
)
def test_a_body_that_is_no_object_is_refused(server: EchoServer, body: bytes, words: str) -> None:
    reply = server.post("/v1/completions", body)
    assert (reply.status, reply.error["code"]) == (400, "invalid_json")
    assert words in reply.error["message"]


def test_a_missing_field_is_named(server: EchoServer) -> None:
    reply = server.post("/v1/completions", {})
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, "prompt", "missing_field")


def test_unknown_models_paths_and_methods_have_their_codes(server: EchoServer) -> None:
    assert server.complete(model="gpt-9").status == 404
    assert server.complete(model="gpt-9").error["code"] == "model_not_found"
    assert server.get("/v1/embeddings").error["code"] == "unknown_url"
    wrong = server.get("/v1/completions")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert "GET is not for" in wrong.error["message"]


def test_a_body_that_is_too_large_is_refused_without_being_kept(server: EchoServer) -> None:
    reply = server.post("/v1/completions", json.dumps({"prompt": "A" * 17_000_000}).encode())
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")


def test_whatever_is_refused_counts_as_rejected() -> None:
    with echo_server() as server:
        refusals = [
            server.complete("~" * 6401),
            server.complete("A" * 64),
            server.complete(temprature=1),
            server.post("/v1/completions", b"{"),
            server.post("/v1/chat/completions", {"messages": []}),
            server.complete(model="gpt-9"),
        ]
        assert [reply.status for reply in refusals] == [400, 400, 400, 400, 400, 404]
        counts = server.service.snapshot().counts
        assert (counts.submitted, counts.rejected) == (6, 6)


def test_a_model_without_tokenizer_takes_token_ids_and_tells_what_it_cannot_take() -> None:
    with echo_server(codec=None) as server:
        assert server.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 2}).status == 200
        for reply in (server.complete(), server.chat()):
            assert (reply.status, reply.error["code"]) == (400, "no_tokenizer")
