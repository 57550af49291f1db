"""What a rehearsal runs: a profile as tables of times, and a model with the same layers and smaller KV."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dejavu.models.modelled_times import LEAST_HIDDEN_SIZE, ModelledTimes, TimeTable
from dejavu.models.spec import ModelSpec
from dejavu.planning.costs import Costs

_EVERY_ROW = 16
_ROW_GROWTH = 1.125
_TOKEN_GROWTH = 1.2
_DIGITS = 7
"""Significant ones of a time in a table; it travels with every plan."""


def rehearsed(
    spec: ModelSpec, costs: Costs, *, most_rows: int, overhead: float, time_scale: float, kv_scale: float
) -> ModelSpec:
    """The model as stages of a rehearsal have it: timed, and with KV and activations as near to the scale as fits.

    Args:
        spec: of the model itself.
        costs: its times.
        most_rows: of a microbatch.
        overhead: m: what prompts take while their KV is streamed, over what ``costs`` say.
        time_scale: every time is multiplied by it.
        kv_scale: wanted bytes of KV, over the model's; from above 0 to 1.
    """
    heads, head_dim = scaled_heads(spec.num_kv_heads, spec.head_dim, kv_scale)
    prompt = _table(lambda rows, tokens: overhead * costs.prompt_time_s(rows, tokens), most_rows, spec.max_length)
    times = ModelledTimes(
        source=costs.source,
        prompt=prompt,
        step=_table(costs.step_time_s, most_rows, spec.max_length),
        time_scale=time_scale,
        kv_scale=heads * head_dim / (spec.num_kv_heads * spec.head_dim),
    )
    return msgspec.structs.replace(
        spec,
        num_kv_heads=heads,
        head_dim=head_dim,
        hidden_size=max(LEAST_HIDDEN_SIZE, round(spec.hidden_size * kv_scale)),
        modelled=times,
    )


def scaled_heads(num_kv_heads: int, head_dim: int, scale: float) -> tuple[int, int]:
    """KV heads and head_dim of about ``scale`` times the size: fewer heads first, then a shorter one."""
    wanted = num_kv_heads * head_dim * scale
    if wanted >= head_dim:
        return round(wanted / head_dim), head_dim
    return 1, max(1, round(wanted))


def _table(seconds_of: Callable[[int, float], float], most_rows: int, most_tokens: int) -> TimeTable:
    rows, tokens = _grown(_EVERY_ROW, _ROW_GROWTH, most_rows), _grown(1, _TOKEN_GROWTH, most_tokens)
    return TimeTable(
        rows=rows,
        tokens=tokens,
        seconds=tuple(tuple(float(f"{seconds_of(count, length):.{_DIGITS}g}") for length in tokens) for count in rows),
    )


def _grown(every: int, growth: float, most: int) -> tuple[int, ...]:
    """1, 2, ... ``every``, then by ``growth`` each, and ``most``."""
    points = list(range(1, min(every, most) + 1))
    while points[-1] < most:
        points.append(min(most, max(points[-1] + 1, round(points[-1] * growth))))
    return tuple(points)
