"""What the load client sends, when, and what it makes of the answers. The endpoint is a fake."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import pytest

from dejavu.clock import SystemClock
from dejavu.config import Config, WorkflowName, WorkloadConfig, WorkloadKind, validate
from dejavu.config.bench import BenchConfig
from dejavu.errors import ConfigError, DejavuError
from dejavu.report.load import Sample
from dejavu.workflows.bench import run
from dejavu.workflows.bench_client import Endpoint, Load, LoadClient, model_of
from dejavu.workflows.bench_stream import Answer, EventSplitter, StreamError, message_of_body
from dejavu.workload import CHAT, COMPLETIONS, Ask, load_asks

from harness.fake_endpoint import KEY, FakeEndpoint, fake_endpoint

CHAT_WORKLOAD = WorkloadConfig(max_tokens=8)


def ask(prompt: str, *, max_tokens: int = 3, arrival_s: float = 0.0) -> Ask:
    body = {"prompt": prompt, "max_tokens": max_tokens}
    return Ask(id=prompt, path=COMPLETIONS, body=body, arrival_s=arrival_s)


def sent(url: str, *asks: Ask, max_concurrency: int | None = None, timeout_s: float = 20.0) -> dict[str, Sample]:
    endpoint = Endpoint.of(url, None, None)
    load = Load(endpoint=endpoint, model="m", asks=asks, timeout_s=timeout_s, max_concurrency=max_concurrency)
    client = LoadClient(load, SystemClock(), lambda _: None)
    asyncio.run(client.run())
    return {sample.id: sample for sample in client.samples}


def synthetic(url: str, tmp_path: Path, *, num_requests: int = 4) -> Config:
    workload = WorkloadConfig(
        kind=WorkloadKind.synthetic, num_requests=num_requests, prompt_tokens=5, max_tokens=3, ignore_eos=True
    )
    config = Config(workload=workload, bench=BenchConfig(url=url, ttft_s=10.0))
    config.workflow.name = WorkflowName.bench
    validate(config)
    return config


def test_a_load_has_every_answer_with_its_tokens_and_pieces() -> None:
    with fake_endpoint(FakeEndpoint()) as url:
        samples = sent(url, ask("a"), ask("b", max_tokens=5))
    told = {name: (one.error, one.prompt_tokens, one.output_tokens) for name, one in samples.items()}
    assert told == {"a": (None, 7, 3), "b": (None, 7, 5)}
    assert [len(samples[name].chunk_times_s) for name in ("a", "b")] == [3, 5]
    assert all(one.due_s <= one.sent_s <= one.chunk_times_s[0] <= one.end_s for one in samples.values())


def test_pieces_are_counted_where_the_endpoint_gives_no_usage() -> None:
    with fake_endpoint(FakeEndpoint(with_usage=False)) as url:
        assert sent(url, ask("a", max_tokens=4))["a"].output_tokens == 4


def test_every_failure_has_its_kind_and_harms_no_other_request() -> None:
    with fake_endpoint(FakeEndpoint()) as url:
        samples = sent(url, ask("429"), ask("cut"), ask("broken"), ask("no text"), ask("fails"), ask("fine"))
    kinds = {name: sample.error for name, sample in samples.items()}
    assert kinds == {
        "429": "http 429",
        "cut": "cut short",
        "broken": "not a chunk",
        "no text": "not a chunk",
        "fails": "error in the stream",
        "fine": None,
    }
    assert samples["429"].detail == "the queue is full"
    assert samples["fails"].detail == "the cluster is gone"


def test_nobody_listening_is_a_failed_connection_of_each_request() -> None:
    with fake_endpoint(FakeEndpoint()) as url:
        pass
    assert [sample.error for sample in sent(url, ask("a"), ask("b")).values()] == ["connection", "connection"]


def test_an_answer_that_does_not_come_is_a_timeout() -> None:
    endpoint = FakeEndpoint(wait_for=2)
    with fake_endpoint(endpoint) as url:
        (sample,) = sent(url, ask("a"), timeout_s=0.2).values()
        endpoint.begin({})
    assert sample.error == "timeout"


def test_requests_are_sent_when_due_although_none_has_been_answered() -> None:
    endpoint = FakeEndpoint(wait_for=30)
    with fake_endpoint(endpoint) as url:
        samples = sent(url, *(ask(f"r{number}", arrival_s=number / 1000) for number in range(30)))
    assert endpoint.most_under_way == 30
    assert all(sample.error is None for sample in samples.values())


def test_a_limit_on_concurrency_makes_requests_wait_in_the_client_which_is_its_lateness_and_not_their_latency() -> None:
    endpoint = FakeEndpoint()
    with fake_endpoint(endpoint) as url:
        samples = sorted(
            sent(url, *(ask(f"r{n}") for n in range(6)), max_concurrency=1).values(), key=lambda s: s.sent_s
        )
    assert endpoint.most_under_way == 1
    for earlier, later in pairwise(samples):
        assert later.sent_s >= earlier.end_s
        assert later.ttft_s == pytest.approx(later.chunk_times_s[0] - later.sent_s)


def test_the_model_is_the_endpoints_first_or_the_one_that_was_asked_for() -> None:
    with fake_endpoint(FakeEndpoint()) as url:
        assert asyncio.run(model_of(Endpoint.of(url, None, None), None)) == "first"
        assert asyncio.run(model_of(Endpoint.of(f"{url}/v1/", KEY, None), "second")) == "second"
        with pytest.raises(ConfigError, match=r"bench\.model=secnd.*\ndid you mean 'second'"):
            asyncio.run(model_of(Endpoint.of(url, None, None), "secnd"))
        with pytest.raises(ConfigError, match="refuses the key"):
            asyncio.run(model_of(Endpoint.of(url, "wrong", None), None))
    with pytest.raises(DejavuError, match="no endpoint answers"):
        asyncio.run(model_of(Endpoint.of(url, None, None), None))


def test_the_workflow_leaves_figures_and_a_line_for_each_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = FakeEndpoint()
    with fake_endpoint(endpoint) as url:
        assert run(synthetic(url, tmp_path), tmp_path) is None
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["requests"] == {"sent": 4, "finished": 4, "failed": 0, "errors": {}, "details": {}}
    assert report["tokens"] == {"prompt": 28, "output": 12}
    assert report["goodput"]["requests"] == 4
    assert report["model"] == "first"
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 4
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert "4 of 4 finished" in capsys.readouterr().out
    body = endpoint.bodies[0]
    assert body["stream"] is True
    assert body["ignore_eos"] is True
    assert len(body["prompt"]) == 5
    assert max(body["prompt"]) < 100


def test_the_workflow_fails_when_no_request_was_answered(tmp_path: Path) -> None:
    config = synthetic("http://127.0.0.1:1", tmp_path)
    config.workload = WorkloadConfig(kind=WorkloadKind.file, path=str(tmp_path / "p.jsonl"), max_tokens=2)
    (tmp_path / "p.jsonl").write_text('{"prompt": "429"}\n{"prompt": "fails"}\n')
    with fake_endpoint(FakeEndpoint()) as url:
        config.bench.url = url
        assert run(config, tmp_path) == 1
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["requests"]["errors"] == {"error in the stream": 1, "http 429": 1}
    assert report["latency"]["time_to_first_token_s"]["p99"] is None


def test_chats_and_texts_are_asked_for_as_such_with_the_fields_that_they_set(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "top_k": 4, "stop": "x"}\n'
        '{"prompt_tokens": [3, 4], "max_tokens": 9}\n'
    )
    chat, ids = load_asks(WorkloadConfig(kind=WorkloadKind.file, path=str(path), max_tokens=8, seed=5), vocab_size=100)
    assert chat.path == CHAT
    assert chat.body == {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 8,
        "temperature": 0.5,
        "seed": 5,
        "top_k": 4,
        "stop": ["x"],
    }
    assert (ids.path, ids.body) == (COMPLETIONS, {"prompt": [3, 4], "max_tokens": 9, "temperature": 0.0})


def test_a_duration_repeats_the_workload_at_its_rate_with_ids_of_their_own() -> None:
    workload = WorkloadConfig(kind=WorkloadKind.chat, num_requests=2, max_tokens=4, rate=10.0)
    asks = load_asks(workload, vocab_size=100, duration_s=2.0)
    assert len(asks) > 8
    assert len({one.id for one in asks}) == len(asks)
    assert all(earlier.arrival_s <= later.arrival_s < 2.0 for earlier, later in pairwise(asks))
    assert asks[3].body == asks[1].body


def test_an_events_line_may_come_in_parts() -> None:
    events = EventSplitter()
    assert events.feed(b": comment\r\nda") == []
    assert events.feed(b'ta: {"a"') == []
    assert events.feed(b": 1}\r\n\r\ndata: [DONE]\n\n") == [b'{"a": 1}', b"[DONE]"]


def test_an_answer_without_text_has_its_first_token_at_its_end() -> None:
    answer = Answer(chunk_times_s=[])
    with pytest.raises(StreamError, match="ended after 0 pieces"):
        answer.check_whole()
    answer.take(b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}', 1.0)
    answer.take(b'{"choices": [{"delta": {}, "finish_reason": "stop"}]}', 2.0)
    answer.check_whole()
    assert answer.chunk_times_s == [2.0]


def test_the_message_of_a_body_is_that_of_its_error_object_or_its_text() -> None:
    assert message_of_body(b'{"error": {"message": "too\\n long"}}') == "too long"
    assert message_of_body(b"<html>bad gateway</html>") == "<html>bad gateway</html>"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": "localhost:8000"}, "bench.url=localhost:8000: must be http://HOST:PORT"),
        ({"ttft_s": 0.0}, "bench.ttft_s=0.0: must be more than 0 s"),
        ({"max_concurrency": 0}, "bench.max_concurrency=0: must be at least 1"),
        ({"duration_s": 5.0}, "bench.duration_s=5: repeats requests at a rate"),
    ],
)
def test_a_bench_that_cannot_be_made_is_refused(change: dict[str, object], words: str) -> None:
    config = Config(bench=BenchConfig(**change), workload=CHAT_WORKLOAD)  # type: ignore[arg-type]
    config.workflow.name = WorkflowName.bench
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert words in str(caught.value)


def test_the_section_bench_is_refused_for_another_workflow_unless_it_is_the_key_of_the_environment() -> None:
    validate(Config(bench=BenchConfig(api_key="k"), workload=CHAT_WORKLOAD))
    with pytest.raises(ConfigError, match="bench is for workflow=bench, and the choice is workflow=generate"):
        validate(Config(bench=BenchConfig(model="m"), workload=CHAT_WORKLOAD))
