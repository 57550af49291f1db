"""Prompts of random token ids with lengths that are given, and lengths of answers out of a distribution."""

from __future__ import annotations

import math
import random
from collections.abc import Collection

import numpy as np

from dejavu.errors import ConfigError


def new_tokens(num_requests: int, most: int, median: float | None, sigma: float, seed: int) -> list[int]:
    """How long the answer to each of the requests is: ``most``; or, with a median, drawn and cut to [1, most].

    Lengths are lognormal: their logarithms have the standard deviation ``sigma``. The same seed gives the same
    lengths, and a longer run begins like a shorter one.
    """
    if median is None:
        return [most] * num_requests
    draw = random.Random(f"lengths {seed}")
    location = math.log(median)
    return [min(most, max(1, round(draw.lognormvariate(location, sigma)))) for _ in range(num_requests)]


class TokenSource:
    """Draws token ids. The same seed and index give the same ids, however many requests there are."""

    def __init__(self, vocab_size: int, avoid: Collection[int], seed: int) -> None:
        """``avoid`` are ids that mean something to the model, such as the end of a text.

        Raises:
            ConfigError: nothing is left to draw.
        """
        self._allowed = np.setdiff1d(np.arange(vocab_size), np.array(sorted(avoid), dtype=np.int64))
        self._seed = seed
        if not len(self._allowed):
            raise ConfigError(f"no token is left to draw: {vocab_size} in the vocabulary, {len(avoid)} of them special")

    def draw(self, index: int, num_tokens: int) -> tuple[int, ...]:
        """Token ids of request ``index``."""
        generator = np.random.default_rng([self._seed, index])
        chosen = self._allowed[generator.integers(len(self._allowed), size=num_tokens)]
        return tuple(chosen.tolist())
