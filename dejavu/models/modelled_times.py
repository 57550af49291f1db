"""How long the passes of a rehearsal take: tables of times that travel with the plan. Pure values."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from dejavu.models.stage_share import StageShare

LEAST_HIDDEN_SIZE = 8
"""A hidden state of a rehearsal carries its token and what was read."""


class TimeTable(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds by rows and tokens, linear between neighbours and as between the last two beyond them."""

    rows: tuple[int, ...]
    """Ascending."""
    tokens: tuple[float, ...]
    """Ascending."""
    seconds: tuple[tuple[float, ...], ...]
    """For each of ``rows``, one for each of ``tokens``."""

    def at(self, rows: float, tokens: float) -> float:
        """Seconds, never below 0."""
        lower, share = _place(self.rows, rows)
        value = _along(self.tokens, self.seconds[lower], tokens)
        if share:
            value += share * (_along(self.tokens, self.seconds[lower + 1], tokens) - value)
        return max(0.0, value)


class ModelledTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What stages wait for instead of computing, and what they are smaller by than the model that they stand for."""

    source: str
    """For people: where the times come from."""
    prompt: TimeTable
    """Of so many prompts of so many tokens each through the whole model on one machine."""
    step: TimeTable
    """Of a step of so many rows with so many tokens behind each."""
    time_scale: float
    """Every time is multiplied by it."""
    kv_scale: float
    """Bytes of KV here, over bytes of the model's KV."""

    def prompt_s(self, rows: int, tokens: int, share: float) -> float:
        """Of a stage with ``share`` of the layers; ``tokens`` of the longest row."""
        return self.prompt.at(rows, tokens) * share * self.time_scale

    def step_s(self, rows: int, context: int, share: StageShare) -> float:
        """Of a stage with that share; ``context`` tokens behind the longest row."""
        return share.step_s(self.step.at(rows, context), self.step.at(rows, 1)) * self.time_scale


def _along(points: Sequence[float], values: Sequence[float], at: float) -> float:
    lower, share = _place(points, at)
    value = values[lower]
    return value + share * (values[lower + 1] - value) if share else value


def _place(points: Sequence[float], at: float) -> tuple[int, float]:
    """The point at or before ``at``, and how far it is on the way to the next one; before the first, the first."""
    if len(points) == 1 or at <= points[0]:
        return 0, 0.0
    lower = min(bisect_right(points, at), len(points) - 1) - 1
    return lower, (at - points[lower]) / (points[lower + 1] - points[lower])
