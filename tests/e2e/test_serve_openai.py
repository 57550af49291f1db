"""A service as its users have it: OpenAI's own client and curl, real workers, a worker that dies, and the end."""

from __future__ import annotations

import itertools
import json
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from dejavu.config import Config, StoreConfig, StoreKind
from dejavu.config.declared import put_at
from dejavu.errors import ConfigError
from dejavu.report.completions import read_completions
from dejavu.workflows import apply

from harness.launched import eventually, own_store
from harness.processes import our_processes, wait_gone
from harness.served import PATIENCE_S, Served, chatty_model, served
from harness.whole_model import Right

pytestmark = pytest.mark.slow

WORKERS = [
    "strategy=colocated",
    "strategy.stages=2",
    "strategy.replication=1",
    "strategy.microbatch.token=4",
    "strategy.microbatch.prompt_tokens=64",
]
GREEDY: dict[str, Any] = {"temperature": 0, "model": "chatty"}
NUM_HANG_UPS = 30
NUM_STAGES = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatty_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def right(folder: Path) -> Right:
    return Right(folder)


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    before = our_processes()
    home = tmp_path_factory.mktemp("served")
    model = ["model=local", f"model.path={folder}"]
    with own_store(home) as store, served(home, store, *model, *WORKERS) as made:
        yield made
    assert wait_gone(before, timeout_s=10.0) == {}


def streamed(service: Served, prompt: str, max_tokens: int) -> Iterator[str]:
    extra = {"ignore_eos": True}
    stream = service.client.completions.create(
        prompt=prompt, max_tokens=max_tokens, stream=True, extra_body=extra, **GREEDY
    )
    for chunk in stream:
        yield from (choice.text for choice in chunk.choices)


def test_the_client_gets_what_the_whole_model_says(service: Served, right: Right) -> None:
    assert [model.id for model in service.client.models.list()] == ["chatty"]
    answer = service.client.completions.create(prompt="hello", max_tokens=12, extra_body={"ignore_eos": True}, **GREEDY)
    assert answer.choices[0].text == right.text("hello", 12)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)
    assert "".join(streamed(service, "hello", 12)) == right.text("hello", 12)


def test_an_answer_that_ends_with_its_first_token_is_empty_and_its_neighbours_are_right(
    service: Served, right: Right
) -> None:
    """Field report B04."""
    create = service.client.completions.create
    ended = right.ends_at_once()
    with ThreadPoolExecutor(5) as pool:
        others = [pool.submit(lambda: "".join(streamed(service, "others", 20))) for _ in range(3)]
        by_token = pool.submit(create, prompt=ended, max_tokens=20, **GREEDY)
        stop = right.text("hello", 1)
        by_string = pool.submit(create, prompt="hello", max_tokens=20, stop=[stop], **GREEDY)
        answers = [by_token.result(PATIENCE_S), by_string.result(PATIENCE_S)]
        assert {other.result(PATIENCE_S) for other in others} == {right.text("others", 20)}
    for answer in answers:
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 1
    chunks = list(create(prompt=ended, max_tokens=20, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == ""
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_short_prompts_wait_for_no_more_than_one_long_one(service: Served) -> None:
    """Field report B38: by the order of first tokens, since times are the machine's."""
    num_long, num_short = 6, 20

    def ask(prompt: str) -> str:
        return service.client.completions.create(prompt=prompt, max_tokens=2, **GREEDY).id

    with ThreadPoolExecutor(num_long + num_short) as pool:
        # Nothing is computed until all of them wait: a frozen worker is no dead one until its lease has run out.
        service.strike("w0", signal.SIGSTOP)
        try:
            asked = [pool.submit(ask, "l" * 240) for _ in range(num_long)]
            eventually(lambda: service.num_open() == num_long, "the long ones are open")
            asked += [pool.submit(ask, f"short {number}") for number in range(num_short)]
            eventually(lambda: service.num_open() == num_long + num_short, "all are open")
        finally:
            service.strike("w0", signal.SIGCONT)
        ids = {one.result(PATIENCE_S) for one in asked}
    lines = [line for line in read_completions(service.run.completions) if line.id in ids]
    order = [line.prompt_tokens > 64 for line in sorted(lines, key=lambda line: line.first_token_s or 0.0)]
    assert order.count(True) == num_long
    # As many prompts as there are stages were sent before a short one was there.
    until_last_short = order[NUM_STAGES : len(order) - order[::-1].index(False)]
    assert (True, True) not in set(itertools.pairwise(until_last_short))


def test_a_chat_is_put_into_the_models_template(service: Served, right: Right) -> None:
    messages: Any = [{"role": "user", "content": "what now"}]
    extra = {"ignore_eos": True}
    answer = service.client.chat.completions.create(
        messages=messages, max_completion_tokens=9, extra_body=extra, logprobs=True, top_logprobs=2, **GREEDY
    )
    said = right.chat(*messages, max_tokens=9)
    assert answer.choices[0].message.content == said
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 9
    assert all(one.top_logprobs[0].logprob == one.logprob for one in logprobs.content), "greedy takes the likeliest"
    stream = service.client.chat.completions.create(
        messages=messages,
        max_completion_tokens=9,
        extra_body=extra,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    # The next turn, with the answer as the client's library has it.
    messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "and then"}]
    second = service.client.chat.completions.create(
        messages=messages, max_completion_tokens=9, extra_body=extra, **GREEDY
    )
    assert second.choices[0].message.content == right.chat(*messages, max_tokens=9)


def test_a_seed_draws_the_same_again_and_none_draws_anew(service: Served) -> None:
    def drawn(**fields: Any) -> str:
        answer = service.client.completions.create(
            model="chatty", prompt="dice", max_tokens=20, extra_body={"ignore_eos": True, "top_k": 50}, **fields
        )
        return answer.choices[0].text

    assert drawn(seed=1) == drawn(seed=1)
    assert len({drawn() for _ in range(3)}) > 1


def test_the_client_knows_our_errors(service: Served) -> None:
    create = service.client.completions.create
    with pytest.raises(openai.BadRequestError, match=r"prompt of 300 tokens .* max_length 256"):
        create(prompt="x" * 300, max_tokens=5, **GREEDY)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        create(prompt="x", model="gpt-9")
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'"):
        create(prompt="x", model="chatty", extra_body={"temprature": 0})
    with pytest.raises(openai.AuthenticationError):
        service.client.with_options(api_key="wrong").models.list()


def test_curl_gets_the_same(service: Served, right: Right) -> None:
    body = {"prompt": "hello", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    status, content = service.curl("/v1/completions", body)
    assert (status, json.loads(content)["choices"][0]["text"]) == (200, right.text("hello", 6))
    status, content = service.curl("/v1/completions", {**body, "stream": True})
    assert content.rstrip().endswith("data: [DONE]")
    assert service.curl("/v1/completions", body, key="wrong")[0] == 401
    assert service.curl("/v1/completions", {**body, "max_tokens": 300})[0] == 400


@pytest.mark.faults
def test_a_worker_that_dies_during_a_stream_costs_a_pause_and_readiness_tells_of_it(
    service: Served, right: Right
) -> None:
    """Field reports B12 and B34."""
    seen: list[tuple[int, Any]] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            seen.append(service.get("/ready"))

    with ThreadPoolExecutor() as pool:
        watching = pool.submit(watch)
        try:
            stream = streamed(service, "dying", 150)
            text = "".join(next(stream) for _ in range(5))
            service.strike("w1")
            text += "".join(stream)
        finally:
            is_over.set()
        watching.result()
    assert text == right.text("dying", 150)
    reasons = {answer.get("reason") for status, answer in seen if status == 503}
    assert any("repair is under way" in str(reason) for reason in reasons), "it was never unready"
    assert service.get("/ready") == (200, {"status": "ready"})


def test_clients_that_hang_up_at_random_cost_the_others_nothing(service: Served, right: Right) -> None:
    """Field report B10."""
    chooser = random.Random(1)

    def hang_up(after: int) -> None:
        if after == 0:
            service.ask_and_leave({"prompt": "never mind", "max_tokens": 200, "ignore_eos": True})
            return
        stream = streamed(service, "never mind", 200)
        for _ in range(after):
            next(stream)
        stream.close()  # type: ignore[attr-defined]

    with ThreadPoolExecutor(12) as pool:
        gone = [pool.submit(hang_up, chooser.choice([0, 1, 1, 2, 5, 9])) for _ in range(NUM_HANG_UPS)]
        others = [pool.submit(lambda: "".join(streamed(service, "others", 20))) for _ in range(10)]
        texts = [one.result(PATIENCE_S) for one in others]
        for one in gone:
            one.result(PATIENCE_S)
    assert set(texts) == {right.text("others", 20)}


def test_the_declared_state_changes_while_streams_run_and_what_cannot_is_refused(
    service: Served, right: Right, tmp_path: Path
) -> None:
    def wish(**values: object) -> Config:
        config = Config(store=StoreConfig(kind=StoreKind.external, endpoints=list(service.run.store.endpoints)))
        config.cluster.name = service.run.keys.cluster
        for key, value in values.items():
            put_at(config, f"strategy.{key.replace('microbatch_', 'microbatch.')}", value)
        config.apply.given = [f"strategy.{key.replace('microbatch_', 'microbatch.')}" for key in values]
        return config

    with ThreadPoolExecutor(12) as pool:
        texts = [pool.submit(lambda: "".join(streamed(service, "moving", 120))) for _ in range(12)]
        for change in ({"in_flight": 1, "microbatch_token": 2}, {"in_flight": 4, "microbatch_token": 3}):
            apply.run(wish(**change), tmp_path)
            told = json.loads((tmp_path / "change.json").read_text())
            assert (told["phase"], told["differences"]["strategy.in_flight"][1]) == ("done", change["in_flight"])
        with pytest.raises(ConfigError, match=r"strategy.replication=2: must be from 0 to 1"):
            apply.run(wish(replication=2), tmp_path)
        with pytest.raises(ConfigError, match=r"strategy.stages: cannot change while the cluster runs"):
            apply.run(wish(stages=1), tmp_path)
        assert {text.result(PATIENCE_S) for text in texts} == {right.text("moving", 120)}


def test_told_to_stop_it_ends_what_is_open_and_says_what_it_did(service: Served, right: Right) -> None:
    """The last test of this service."""
    stream = streamed(service, "the end", 200)
    text = next(stream)
    service.run.send(signal.SIGTERM)
    eventually(lambda: service.get("/ready")[0] == 503, "it is not ready any more")
    with pytest.raises(openai.InternalServerError, match="stopping"):
        service.client.completions.create(prompt="late", **GREEDY)
    assert text + "".join(stream) == right.text("the end", 200)
    status, out, _ = service.run.end()
    assert status == 0
    metrics = json.loads((service.run.folder / "metrics.json").read_text())
    requests, by_reason = metrics["requests"], metrics["requests"]["by_reason"]
    assert requests["submitted"] == sum(by_reason.values()) == requests["finished"] + requests["failed"]
    assert 0 < by_reason["abort"] <= NUM_HANG_UPS
    assert by_reason.get("error", 0) == 0
    assert len(metrics["repairs"]) == 1
    lines = (service.run.folder / "completions.jsonl").read_text().splitlines()
    assert len(lines) == requests["submitted"] - by_reason["rejected"]
    assert "output:" in out
