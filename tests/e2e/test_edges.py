"""The edges of a request's life on a real cluster; each has its defined answer and harms no other."""

from __future__ import annotations

import pytest

from dejavu.ids import RequestId
from dejavu.request import Completion, Request, Sampling

from harness.cluster_kit import Kit, cluster, ragged_requests, reference_tokens


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> object:
    output = tmp_path_factory.mktemp("edges")
    with cluster(
        output,
        "model=tiny-llama",
        "strategy.split.prompt=1",
        "strategy.split.token=2",
        "strategy.microbatch.token=2",
        "model.max_length=96",
    ) as running:
        yield running


def with_neighbours(kit: Kit, odd: Request) -> tuple[Completion, dict[RequestId, Completion], list[Request]]:
    """The odd request's completion, and those of the ordinary requests around it."""
    neighbours = ragged_requests(4, vocab_size=kit.plan.model.vocab_size, seed=5, max_tokens=8)
    completions = kit.serve([neighbours[0], odd, *neighbours[1:]])
    odd_completion = completions.pop(odd.id)
    return odd_completion, completions, neighbours


def assert_unharmed(kit: Kit, completions: dict[RequestId, Completion], requests: list[Request]) -> None:
    assert {one.id: one.tokens for one in completions.values()} == reference_tokens(kit.folder, requests)


def request(kit: Kit, **changes: object) -> Request:
    values: dict[str, object] = {"id": RequestId("odd"), "prompt_tokens": (5, 9, 23, 7), "max_tokens": 10, **changes}
    return Request(**values)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_tokens": ()}, "the prompt is empty"),
        ({"prompt_tokens": (1,) * 97, "max_tokens": 1}, "max_length 96"),
        ({"prompt_tokens": (1,) * 960, "max_tokens": 1}, "max_length 96"),
        ({"prompt_tokens": (1,) * 90, "max_tokens": 7}, "= 97 exceeds the model's max_length 96"),
        ({"prompt_tokens": (1, 99999)}, "token id 99999 is outside the vocabulary"),
    ],
    ids=["empty", "one-too-long", "ten-times-too-long", "prompt-and-tokens-too-long", "unknown-token"],
)
def test_a_request_that_cannot_be_served_gets_its_reason_and_others_are_unharmed(
    kit: Kit, changes: dict[str, object], reason: str
) -> None:
    odd, completions, neighbours = with_neighbours(kit, request(kit, **changes))
    assert odd.finish_reason == "error"
    assert reason in (odd.error or "")
    assert odd.tokens == ()
    assert_unharmed(kit, completions, neighbours)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 95])
def test_a_prompt_of_any_length_up_to_the_limit_gives_the_reference_tokens(kit: Kit, length: int) -> None:
    prompt = tuple((7 * index + 3) % 200 for index in range(length))
    one = request(kit, prompt_tokens=prompt, max_tokens=min(6, 96 - length))
    odd, completions, neighbours = with_neighbours(kit, one)
    assert odd.tokens == reference_tokens(kit.folder, [one])[one.id]
    assert_unharmed(kit, completions, neighbours)


@pytest.mark.slow
def test_max_tokens_1_ends_with_the_prompts_own_token(kit: Kit) -> None:
    odd, completions, neighbours = with_neighbours(kit, request(kit, max_tokens=1))
    assert (len(odd.tokens), odd.finish_reason) == (1, "length")
    assert_unharmed(kit, completions, neighbours)


@pytest.mark.slow
def test_a_stop_string_completed_by_the_first_token_gives_empty_text(kit: Kit) -> None:
    assert kit.codec is not None
    tries = [
        request(kit, id=RequestId(f"try{seed}"), prompt_tokens=(seed, 3, 5 * seed), max_tokens=1) for seed in range(40)
    ]
    firsts = {one.id: kit.codec.decode(one.tokens) for one in kit.serve(tries).values()}
    chosen = next(one for one in tries if firsts[one.id].isascii() and firsts[one.id])
    odd, completions, neighbours = with_neighbours(
        kit, request(kit, prompt_tokens=chosen.prompt_tokens, stop=(firsts[chosen.id],), ignore_eos=True)
    )
    assert (odd.text, odd.finish_reason, len(odd.tokens)) == ("", "stop", 1)
    assert_unharmed(kit, completions, neighbours)


@pytest.mark.slow
def test_a_sampled_request_is_the_same_whoever_its_neighbours_are(kit: Kit) -> None:
    sampled = request(kit, sampling=Sampling(temperature=0.9, top_p=0.9, top_k=40, seed=11), ignore_eos=True)
    alone = kit.serve([sampled])[sampled.id]
    among, completions, neighbours = with_neighbours(kit, sampled)
    assert among.tokens == alone.tokens
    assert alone.tokens != reference_tokens(kit.folder, [request(kit, ignore_eos=True)])[sampled.id]
    assert_unharmed(kit, completions, neighbours)
