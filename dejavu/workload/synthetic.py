"""Prompts of random token ids with lengths that are given."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from dejavu.errors import ConfigError


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
