"""Sampling: greedy, filtered, and drawn by (seed, position) alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dejavu.models.sampling import probabilities, sample
from dejavu.request import Sampling


def random_logits(num_rows: int, num_tokens: int = 50) -> torch.Tensor:
    return torch.randn(num_rows, num_tokens, generator=torch.Generator().manual_seed(3)) * 2


def test_greedy_rows_take_the_largest_logit() -> None:
    logits_BV = random_logits(5)
    assert sample(logits_BV, [Sampling()] * 5, [9] * 5) == logits_BV.argmax(-1).tolist()


def test_a_draw_does_not_depend_on_the_batch_or_its_order() -> None:
    logits_BV = random_logits(6)
    params = [Sampling(temperature=1.0, seed=seed) for seed in range(5)] + [Sampling()]
    positions = [4, 9, 1, 1, 700, 3]
    together = sample(logits_BV, params, positions)
    alone = [sample(logits_BV[row : row + 1], [params[row]], [positions[row]])[0] for row in range(6)]
    backwards = sample(logits_BV.flip(0), params[::-1], positions[::-1])[::-1]
    assert together == alone == backwards


def test_draws_differ_between_positions_and_between_seeds() -> None:
    logits_BV = torch.zeros(40, 1000)
    by_position = sample(logits_BV, [Sampling(temperature=1.0, seed=7)] * 40, list(range(40)))
    by_seed = sample(logits_BV, [Sampling(temperature=1.0, seed=seed) for seed in range(-20, 20)], [5] * 40)
    assert len(set(by_position)) > 30
    assert len(set(by_seed)) > 30


@pytest.mark.parametrize("temperature", [1e-3, 1e-100, 1e-307, 1e-310, 5e-324])
def test_a_temperature_next_to_zero_takes_the_likeliest_token(temperature: float) -> None:
    """Scores beyond every number are none, and the last token of the vocabulary was drawn."""
    logits_BV = random_logits(3) + 50
    params = [Sampling(temperature=temperature, top_k=top_k, seed=1) for top_k in (0, 5, 50)]
    with np.errstate(over="raise", invalid="raise"):
        assert sample(logits_BV, params, [1, 2, 3]) == logits_BV.argmax(-1).tolist()


def test_many_draws_follow_the_distribution() -> None:
    wanted = np.array([0.5, 0.3, 0.15, 0.05])
    logits_BV = torch.tensor(np.log(wanted)).float().expand(4000, 4)
    tokens = sample(logits_BV, [Sampling(temperature=1.0, seed=1)] * 4000, list(range(4000)))
    shares = np.bincount(tokens, minlength=4) / 4000
    assert np.abs(shares - wanted).max() < 0.03


@pytest.mark.parametrize(
    "param",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=1.3, top_k=7),
        Sampling(temperature=0.9, top_p=0.8),
        Sampling(temperature=1.1, top_k=12, top_p=0.6),
        Sampling(temperature=1.0, top_p=0.0001),
        Sampling(temperature=1.0, top_k=1000),
    ],
)
def test_the_distribution_equals_that_of_hugging_faces_warpers(param: Sampling) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = random_logits(1).double()
    scores = TemperatureLogitsWarper(param.temperature)(None, logits)
    if param.top_k:
        scores = TopKLogitsWarper(param.top_k)(None, scores)
    if param.top_p < 1.0:
        scores = TopPLogitsWarper(param.top_p)(None, scores)
    np.testing.assert_allclose(probabilities(logits[0].numpy(), param), scores.softmax(-1)[0].numpy(), atol=1e-12)


def test_a_token_that_top_k_drops_is_never_drawn() -> None:
    logits_BV = torch.zeros(300, 10)
    logits_BV[:, :2] = 1.0
    tokens = sample(logits_BV, [Sampling(temperature=5.0, top_k=2, seed=2)] * 300, list(range(300)))
    assert set(tokens) == {0, 1}
