"""Built-in and random requests, and when requests arrive."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from dejavu.config import WorkloadConfig, WorkloadKind
from dejavu.errors import ConfigError
from dejavu.request import Request
from dejavu.workload import Message, load
from dejavu.workload.arrivals import poisson_times


class CountingCodec:
    """Token ids are word counts; enough for loading."""

    vocab_size = 500

    def encode(self, text: str) -> list[int]:
        return [len(text.split())]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return [len(message["content"].split()) for message in messages]


def synthetic(**changes: object) -> list[Request]:
    workload = WorkloadConfig(
        kind=WorkloadKind.synthetic, num_requests=6, prompt_tokens=40, max_tokens=5, ignore_eos=True
    )
    for key, value in changes.items():
        setattr(workload, key, value)
    return load(workload, codec=None, vocab_size=60, avoid=(0, 1, 2))


def test_the_built_in_chats_are_eight_servable_requests_with_ids_of_their_own() -> None:
    requests = load(WorkloadConfig(max_tokens=32), codec=CountingCodec())
    assert len(requests) == 8
    assert len({request.id for request in requests}) == 8
    assert all(request.refusal is None and request.prompt_tokens and request.prompt_text for request in requests)
    assert {request.max_tokens for request in requests} >= {32}
    assert all(request.sampling.is_greedy and request.arrival_s == 0 for request in requests)


def test_synthetic_requests_have_the_declared_lengths_and_no_special_token() -> None:
    requests = synthetic()
    assert [len(request.prompt_tokens) for request in requests] == [40] * 6
    assert {request.max_tokens for request in requests} == {5}
    assert all(request.ignore_eos for request in requests)
    tokens = {token for request in requests for token in request.prompt_tokens}
    assert tokens <= set(range(3, 60))
    assert len(tokens) > 30


def test_synthetic_requests_depend_on_seed_and_index_alone() -> None:
    assert synthetic() == synthetic()
    assert synthetic(num_requests=3) == synthetic()[:3]
    assert synthetic(seed=1)[0].prompt_tokens != synthetic()[0].prompt_tokens
    assert len({request.prompt_tokens for request in synthetic()}) == 6


def test_a_vocabulary_of_special_tokens_alone_is_refused() -> None:
    workload = WorkloadConfig(kind=WorkloadKind.synthetic, num_requests=1, prompt_tokens=1, max_tokens=1)
    with pytest.raises(ConfigError, match="no token is left"):
        load(workload, codec=None, vocab_size=2, avoid=(0, 1))


def test_rate_zero_lets_all_arrive_at_once() -> None:
    assert {request.arrival_s for request in synthetic(rate=0.0)} == {0.0}


def test_poisson_times_are_the_same_for_the_same_seed_and_begin_at_zero() -> None:
    times_s = poisson_times(50, 4.0, seed=3)
    assert times_s == poisson_times(50, 4.0, seed=3)
    assert times_s[:20] == poisson_times(20, 4.0, seed=3)
    assert times_s != poisson_times(50, 4.0, seed=4)
    assert times_s[0] == 0.0
    assert times_s == sorted(times_s)


def test_poisson_gaps_have_the_declared_mean_and_an_exponentials_spread() -> None:
    gaps_s = [later - earlier for earlier, later in pairwise(poisson_times(20_000, 4.0, seed=0))]
    mean_s = sum(gaps_s) / len(gaps_s)
    assert mean_s == pytest.approx(0.25, rel=0.05)
    deviation_s = (sum((gap - mean_s) ** 2 for gap in gaps_s) / len(gaps_s)) ** 0.5
    assert deviation_s == pytest.approx(mean_s, rel=0.05)


def test_arrivals_do_not_change_the_prompts() -> None:
    at_once, spread = synthetic(rate=0.0), synthetic(rate=2.0)
    assert [request.prompt_tokens for request in at_once] == [request.prompt_tokens for request in spread]
    assert spread[-1].arrival_s > 0
