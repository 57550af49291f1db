"""How a model's layers are cut into stages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dejavu.errors import ConfigError
from dejavu.kv.layout import LayerRange


def balanced_layers(
    num_layers: int, depth: int, *, last_extra: float = 0.0, subject: str = "the pipeline"
) -> tuple[LayerRange, ...]:
    """``depth`` ranges that cover every layer, each stage's work as equal as whole layers allow.

    Args:
        num_layers: layers of the model.
        depth: stages; 1 <= depth <= num_layers.
        last_extra: work of the last stage beside its layers (the head), in layers.
        subject: what the error calls the pipeline, e.g. ``strategy.stages=5``.

    Raises:
        ConfigError: more stages than layers, or fewer than one.
    """
    check_depth(num_layers, depth, subject)
    share = (num_layers + last_extra) / depth
    bounds = [0]
    for index in range(1, depth):
        ideal = round(share * index)
        bounds.append(min(max(ideal, bounds[-1] + 1), num_layers - (depth - index)))
    bounds.append(num_layers)
    return tuple(LayerRange(start, stop) for start, stop in pairwise(bounds))


def check_depth(num_layers: int, depth: int, subject: str) -> None:
    """Raises ConfigError unless 1 <= depth <= num_layers; the message names both numbers."""
    if depth < 1:
        raise ConfigError(f"{subject}: a pipeline needs at least 1 stage")
    if depth > num_layers:
        raise ConfigError(
            f"{subject}: {depth} stages, but the model has {num_layers} layers; "
            f"a stage needs at least one layer, so at most {num_layers} stages"
        )


def explicit_layers(
    ranges: Sequence[Sequence[int]], num_layers: int, depth: int, subject: str
) -> tuple[LayerRange, ...]:
    """The user's own ranges [a, b), checked to cover every layer once, in order, one range a stage.

    Raises:
        ConfigError: naming the range at fault and what it should have been.
    """
    check_depth(num_layers, depth, subject)
    if len(ranges) != depth:
        raise ConfigError(f"{subject}: {depth} stages, but strategy.layers gives {len(ranges)} ranges")
    expected = 0
    for index, pair in enumerate(ranges):
        if len(pair) != 2 or pair[0] != expected or pair[1] <= pair[0]:
            raise ConfigError(
                f"strategy.layers of {subject}: range {index} is {list(pair)}; "
                f"it must be [{expected}, b] with b > {expected} (ranges are [a, b), in order, without gaps)"
            )
        expected = pair[1]
    if expected != num_layers:
        raise ConfigError(f"strategy.layers of {subject} ends at layer {expected}; the model has {num_layers} layers")
    return tuple(LayerRange(start, stop) for start, stop in ranges)
