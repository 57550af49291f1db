"""Boxes of cells: the arithmetic of (layers, heads, positions) under ``route``."""

from __future__ import annotations

from typing import Final, TypeAlias

Span: TypeAlias = tuple[int, int]
"""[start, stop)."""

BOTH: Final[Span] = (0, 2)
"""K (0) and V (1) of a cell."""

Box: TypeAlias = tuple[Span, Span, Span]
"""Layers, heads and positions, each [start, stop) and never empty."""


def intersect_spans(one: Span, other: Span) -> Span | None:
    """What both spans hold, or None."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else None


def intersect(one: Box, other: Box) -> Box | None:
    """The cells of both boxes, or None where they share none."""
    layers = intersect_spans(one[0], other[0])
    heads = intersect_spans(one[1], other[1])
    positions = intersect_spans(one[2], other[2])
    if layers is None or heads is None or positions is None:
        return None
    return layers, heads, positions


def subtract(box: Box, taken: Box) -> list[Box]:
    """Disjoint boxes that hold exactly the cells of ``box`` outside ``taken`` (at most six)."""
    shared = intersect(box, taken)
    if shared is None:
        return [box]
    left: list[Box] = []
    core = box
    for axis in range(3):
        whole, kept = core[axis], shared[axis]
        left += [_with_axis(core, axis, span) for span in ((whole[0], kept[0]), (kept[1], whole[1])) if _holds(span)]
        core = _with_axis(core, axis, kept)
    return left


def subtract_all(box: Box, taken: list[Box]) -> list[Box]:
    """Disjoint boxes that hold the cells of ``box`` in none of ``taken``."""
    left = [box]
    for other in taken:
        left = [rest for piece in left for rest in subtract(piece, other)]
    return left


def _holds(span: Span) -> bool:
    return span[0] < span[1]


def _with_axis(box: Box, axis: int, span: Span) -> Box:
    spans = list(box)
    spans[axis] = span
    return spans[0], spans[1], spans[2]
