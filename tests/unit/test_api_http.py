"""The HTTP interface: fields, answers, streams, errors and who may ask; its cluster repeats the prompt."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator

import pytest

from harness.echo_service import DEADLINE_S, MODEL, EchoServer, Reply, echo_server


@pytest.fixture(scope="module")
def server() -> Iterator[EchoServer]:
    with echo_server() as made:
        yield made


def text_of(reply: Reply) -> str:
    return "".join(choice["text"] for event in reply.events for choice in event["choices"])


def until(condition: object, what: str) -> None:
    """Looks again and again until it is so."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, f"never: {what}"
        time.sleep(0.002)


def test_the_model_is_listed_and_found_by_its_name(server: EchoServer) -> None:
    (card,) = server.get("/v1/models").json["data"]
    assert (card["id"], card["object"]) == (MODEL, "model")
    assert server.get(f"/v1/models/{MODEL}").json == card
    missing = server.get("/v1/models/other/one")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


def test_a_completion_has_text_usage_and_reason(server: EchoServer) -> None:
    answer = server.complete().json
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "ABCAB", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert answer["model"] == MODEL


def test_a_prompt_may_be_token_ids_alone_or_in_a_list(server: EchoServer) -> None:
    for prompt in ([1, 2, 3], [[1, 2, 3]], ["ABC"]):
        assert server.complete(prompt).json["choices"][0]["text"] == "ABCAB"  # type: ignore[arg-type]


def test_a_chat_has_a_message_and_content_may_come_in_parts(server: EchoServer) -> None:
    for content in ("BCD", [{"type": "text", "text": "B"}, {"type": "text", "text": "CD"}]):
        answer = server.chat(content, max_tokens=None, max_completion_tokens=4).json
        assert answer["object"] == "chat.completion"
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": "BCDB"}
        assert choice["finish_reason"] == "length"


def test_a_stream_has_a_chunk_a_token_a_reason_and_the_usage_that_was_asked_for(server: EchoServer) -> None:
    reply = server.complete(stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert text_of(reply) == "ABCAB"
    *chunks, end, usage = reply.events
    assert [chunk["choices"][0]["text"] for chunk in chunks] == list("ABCAB")
    assert {chunk["usage"] for chunk in [*chunks, end]} == {None}
    assert end["choices"][0]["finish_reason"] == "length"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 5)
    assert len({event["id"] for event in reply.events}) == 1


def test_a_chat_stream_begins_with_the_role(server: EchoServer) -> None:
    events = server.chat(stream=True).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "ABCAB"
    assert events[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert all("usage" not in event for event in events)


@pytest.mark.parametrize("is_stream", [False, True])
def test_nothing_of_a_stop_string_is_given_out(server: EchoServer, is_stream: bool) -> None:
    reply = server.complete("ABCDEF", max_tokens=20, stop=["DEX", "EFA"], stream=is_stream)
    if is_stream:
        assert (text_of(reply), reply.events[-1]["choices"][0]["finish_reason"]) == ("ABCD", "stop")
    else:
        assert reply.json["choices"][0]["text"] == "ABCD"
        assert reply.json["choices"][0]["finish_reason"] == "stop"


def test_a_stop_string_that_the_first_token_completes_leaves_no_text(server: EchoServer) -> None:
    """Field report B04."""
    (choice,) = server.complete("ABC", stop="A").json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert text_of(server.complete("ABC", stop="A", stream=True)) == ""


def test_what_was_held_back_for_a_stop_string_comes_at_the_end(server: EchoServer) -> None:
    assert text_of(server.complete("ABCDEF", max_tokens=5, stop="DEX", stream=True)) == "ABCDE"


def test_log_probabilities_of_a_completion_are_lists_of_equal_length(server: EchoServer) -> None:
    whole = server.complete(logprobs=2).json["choices"][0]["logprobs"]
    assert whole["tokens"] == list("ABCAB")
    assert whole["token_logprobs"] == [-0.5] * 5
    assert whole["top_logprobs"] == [{"@": 0.0, "A": -1.0}] * 5
    assert whole["text_offset"] == [0, 1, 2, 3, 4]
    chunks = [event["choices"][0]["logprobs"] for event in server.complete(logprobs=2, stream=True).events[:-1]]
    assert [offset for chunk in chunks for offset in chunk["text_offset"]] == whole["text_offset"]


@pytest.mark.parametrize(("stops", "text"), [(["CD"], "AB"), (["CDZ", "DEF"], "ABC"), (["A"], ""), (["CAB"], "AB")])
def test_tokens_of_a_stop_string_have_no_log_probabilities(server: EchoServer, stops: list[str], text: str) -> None:
    fields = {"max_tokens": 20, "stop": stops, "logprobs": 0}
    prompt = "ABCDEF" if "CAB" not in stops else "ABC"
    whole = server.complete(prompt, **fields).json["choices"][0]
    assert (whole["text"], whole["logprobs"]["tokens"]) == (text, list(text))
    assert whole["logprobs"]["text_offset"] == list(range(len(text)))
    chunks = [event["choices"][0] for event in server.complete(prompt, stream=True, **fields).events]
    assert [name for chunk in chunks for name in chunk["logprobs"]["tokens"]] == list(text)
    for chunk in chunks:
        assert "".join(chunk["logprobs"]["tokens"]) == chunk["text"]


def test_log_probabilities_of_a_chat_name_each_token_and_the_likeliest(server: EchoServer) -> None:
    content = server.chat(logprobs=True, top_logprobs=1).json["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in content] == list("ABCAB")
    assert content[1]["bytes"] == [66]
    assert content[1]["top_logprobs"] == [{"token": "@", "logprob": 0.0, "bytes": [64]}]
    without = server.chat(logprobs=True).json["choices"][0]["logprobs"]["content"]
    assert without[0]["top_logprobs"] == []


def test_fields_that_change_nothing_are_taken(server: EchoServer) -> None:
    neutral = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "u", "best_of": 1}
    assert server.complete(**neutral, echo=False, suffix=None, seed=5, top_k=-1, top_p=1).status == 200
    assert server.chat(tools=[], response_format={"type": "text"}, store=False, tool_choice=None).status == 200


@pytest.mark.parametrize("top_k", [64, 2**31, 2**63, 2**64, 2**70])
def test_more_tokens_to_choose_from_than_there_are_means_all_of_them(server: EchoServer, top_k: int) -> None:
    """A number that no message has room for ended the service, on the controller's thread."""
    assert server.complete(top_k=top_k).status == 200
    assert server.complete().status == 200


def test_a_message_that_a_client_library_has_got_may_be_sent_back_as_it_is(server: EchoServer) -> None:
    got = server.chat().json["choices"][0]["message"]
    # What OpenAI's client makes of it: each field that there might be.
    unused = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": None}
    turns = [{"role": "user", "content": "ABC"}, {**got, **unused}, {"role": "user", "content": "D", "name": None}]
    fields = {"messages": turns, "max_tokens": 2, "stream_options": {"include_usage": None}, "stream": True}
    assert server.post("/v1/chat/completions", fields).status == 200


def test_a_full_queue_is_429_with_a_time_to_come_again() -> None:
    with echo_server(max_queue=1) as server:
        server.controller.hold()
        waiting = [start(server, {"prompt": "ABC", "max_tokens": 2}) for _ in range(5)]
        until(lambda: server.service.snapshot().counts.open == 5, "five are open: four rows, and one that waits")
        reply = server.complete()
        assert (reply.status, reply.error["code"]) == (429, "queue_full")
        assert int(reply.headers["retry-after"]) >= 1
        server.controller.go_on()
        assert [finish(one).status for one in waiting] == [200] * 5
        assert server.complete().status == 200
        counts = server.service.snapshot().counts
        assert (counts.submitted, counts.finished, counts.rejected, counts.open) == (7, 6, 1, 0)


def test_a_client_that_hangs_up_before_its_body_is_there_is_no_fault_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    with echo_server() as server, caplog.at_level(logging.INFO):
        half = connection_of(server)
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        half.close()
        until(lambda: "/v1/completions: its client has gone" in caplog.text, "it is noticed")
        assert server.complete().status == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_hangs_up_gives_its_request_up(is_stream: bool) -> None:
    with echo_server() as server:
        server.controller.hold()
        gone = start(server, {"prompt": "ABC", "max_tokens": 50, "stream": is_stream})
        until(lambda: server.service.snapshot().counts.open == 1, "it is open")
        gone.close()
        until(lambda: server.service.snapshot().counts.aborted == 1, "it was given up")
        server.controller.go_on()
        assert server.complete().status == 200
        assert server.controller.ledger.admission.num_rows_taken == 0


def test_a_deadline_that_passes_is_504() -> None:
    with echo_server(request_timeout_s=0.05) as server:
        server.controller.hold()
        for fields in ({}, {"stream": True}):
            reply = server.complete(**fields)  # type: ignore[arg-type]
            assert (reply.status, reply.error["code"]) == (504, "timeout")


def test_a_drained_service_refuses_and_says_so() -> None:
    with echo_server() as server:
        server.controller.hold()
        running = start(server, {"prompt": "ABC", "max_tokens": 3})
        until(lambda: server.service.snapshot().counts.open == 1, "it is open")
        assert server.get("/ready").json == {"status": "ready"}
        server.service.begin_drain()
        refused = server.complete()
        assert (refused.status, refused.error["code"]) == (503, "service_unavailable")
        assert int(refused.headers["retry-after"]) > 0
        ready = server.get("/ready")
        assert (ready.status, ready.json["reason"]) == (503, "the service is stopping")
        assert server.get("/health").status == 200
        server.controller.go_on()
        assert finish(running).json["choices"][0]["text"] == "ABC"


def test_requests_of_a_cluster_that_fails_end_with_its_reason_and_later_ones_are_refused() -> None:
    with echo_server() as server:
        server.controller.hold()
        waiting = [start(server, {"prompt": "ABC", "max_tokens": 3, "stream": stream}) for stream in (False, True)]
        until(lambda: server.service.snapshot().counts.open == 2, "both are open")
        server.controller.failure = "worker w1 died\nits log"
        server.controller.wake()
        for one in waiting:
            reply = finish(one)
            assert reply.status == 500
            assert "worker w1 died" in reply.error["message"]
        later = server.complete()
        assert later.status == 503
        assert "worker w1 died" in later.error["message"]
        assert "worker w1 died" in server.get("/ready").json["reason"]
        counts = server.service.snapshot().counts
        assert (counts.submitted, counts.failed, counts.rejected) == (3, 2, 1)


def test_a_request_that_fails_in_the_middle_of_its_stream_ends_it_with_an_error() -> None:
    with echo_server() as server:
        server.controller.hold(after_steps=3)
        stream = start(server, {"prompt": "ABC", "max_tokens": 60, "stream": True})
        until(lambda: server.service.snapshot().counts.generated_tokens == 3, "three tokens have come")
        server.controller.failure = "worker w1 died"
        server.controller.wake()
        reply = finish(stream)
    assert reply.status == 200
    *chunks, error = [line.partition("data: ")[2] for line in reply.body.decode().split("\n") if "data: " in line]
    assert [json.loads(chunk)["choices"][0]["text"] for chunk in chunks] == list("ABC")
    assert "worker w1 died" in json.loads(error)["error"]["message"]


def test_the_token_that_ends_a_request_is_counted_and_has_no_text(server: EchoServer) -> None:
    answer = server.complete("AB@").json
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("AB@", "stop")
    assert answer["usage"]["completion_tokens"] == 3
    assert server.complete("AB@", ignore_eos=True).json["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("what", ["a repair", "a change of the declared state"])
def test_a_service_between_two_epochs_is_not_ready_and_takes_requests_nevertheless(
    server: EchoServer, what: str
) -> None:
    server.controller.is_between, server.controller.is_changing = True, what != "a repair"
    server.complete()
    try:
        reply = server.get("/ready")
        assert reply.status == 503
        assert f"{what} is under way after epoch" in reply.json["reason"]
        assert server.complete().status == 200
    finally:
        server.controller.is_between = server.controller.is_changing = False


def test_a_service_that_has_lost_a_link_is_not_ready_and_names_the_worker(server: EchoServer) -> None:
    server.controller.lost = ("w1",)
    server.complete()
    try:
        reply = server.get("/ready")
        assert (reply.status, reply.json["reason"].partition(";")[0]) == (503, "the link of w1 is lost")
    finally:
        server.controller.lost = ()


def test_a_key_guards_the_api_and_nothing_else() -> None:
    with echo_server(api_key="secret") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            reply = server.get("/v1/models", **headers)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert server.get("/v1/models", Authorization="Bearer secret").status == 200
        assert server.get("/health").status == 200
        assert server.get("/ready").status == 200


def start(server: EchoServer, body: dict[str, object]) -> socket.socket:
    """A request on a connection of its own, sent; its answer is not waited for."""
    content = json.dumps(body).encode()
    connection = connection_of(server)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def connection_of(server: EchoServer) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def finish(connection: socket.socket) -> Reply:
    """Its answer, whole."""
    with connection:
        received = b""
        while part := connection.recv(65536):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    return Reply(int(lines[0].split()[1]), dict(line.lower().split(": ", 1) for line in lines[1:]), body)
