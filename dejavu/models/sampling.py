"""The next token of each row: greedy, or drawn by a counter so that a resumed request draws the same again.

Shape legend in ``cache.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from dejavu.request import Sampling, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

Floats: TypeAlias = npt.NDArray[np.float64]

_MASK_64 = (1 << 64) - 1


def sample(logits_BV: Tensor, params: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """A token id for each row. ``positions[b]`` is the position that the chosen token will take in its row.

    A row's draw depends on its own logits, its seed and its position: not on the batch, its order or the device.
    """
    tokens: list[int] = logits_BV.argmax(dim=-1).tolist()
    for row, (param, position) in enumerate(zip(params, positions, strict=True)):
        if not param.is_greedy:
            logits_V = logits_BV[row].double().cpu().numpy()
            tokens[row] = _draw(probabilities(logits_V, param), param.seed, position)
    return tokens


def log_probabilities(
    logits_BV: Tensor, params: Sequence[Sampling], tokens: Sequence[int]
) -> tuple[TokenLogprobs | None, ...]:
    """For each row that asks: its token's log-probability and the likeliest tokens; empty when none asks.

    Of the model's own distribution, before temperature, top-k and top-p.
    """
    asking = [row for row, param in enumerate(params) if param.top_logprobs is not None]
    if not asking:
        return ()
    told: list[TokenLogprobs | None] = [None] * len(params)
    for row, logprobs_V in zip(asking, logits_BV[asking].float().log_softmax(dim=-1), strict=True):
        top = logprobs_V.topk(min(params[row].top_logprobs or 0, len(logprobs_V)))
        likeliest = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        told[row] = TokenLogprobs(float(logprobs_V[tokens[row]]), likeliest)
    return tuple(told)


def probabilities(logits_V: Floats, param: Sampling) -> Floats:
    """The distribution [V] to draw from: temperature, then top-k, then top-p, as Hugging Face orders them."""
    # From the likeliest one's: however small the temperature is, that one's score is a number, others' at worst -inf.
    with np.errstate(over="ignore"):
        scores_V = (logits_V - logits_V.max()) / param.temperature
    if 0 < param.top_k < len(scores_V):
        least = np.partition(scores_V, -param.top_k)[-param.top_k]
        scores_V = np.where(scores_V < least, -np.inf, scores_V)
    weights_V: Floats = np.exp(scores_V)
    weights_V /= weights_V.sum()
    if param.top_p < 1.0:
        weights_V = _keep_top_p(weights_V, param.top_p)
    return weights_V


def _keep_top_p(weights_V: Floats, top_p: float) -> Floats:
    """The likeliest tokens whose sum first reaches ``top_p``, at least one; normalised."""
    order = np.argsort(-weights_V, kind="stable")
    before = np.cumsum(weights_V[order]) - weights_V[order]
    dropped = order[1:][before[1:] >= top_p]
    kept_V = weights_V.copy()
    kept_V[dropped] = 0.0
    kept_V /= kept_V.sum()
    return kept_V


def _draw(weights_V: Floats, seed: int, position: int) -> int:
    """The token at which the distribution's running sum passes a number that (seed, position) alone decides."""
    key = np.array([seed & _MASK_64, position], dtype=np.uint64)
    uniform = np.random.Generator(np.random.Philox(key=key)).random()
    running_V = np.cumsum(weights_V)
    token = int(np.searchsorted(running_V, uniform * running_V[-1], side="right"))
    # Rounding may put the number on the last step itself, past every token that may be drawn.
    return min(token, int(np.flatnonzero(weights_V)[-1]))
