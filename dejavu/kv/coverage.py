"""Which cells of a row have landed: pure, tolerant of duplicates and of any order."""

from __future__ import annotations

import numpy

from dejavu.kv.box import BOTH, Span
from dejavu.kv.layout import LayerRange


class Coverage:
    """A row's cells (layer, K or V, head, position) over [0, length), each covered or not."""

    __slots__ = ("_covered_LCHS", "_heads", "_layers", "_length", "_num_missing")

    def __init__(self, layers: LayerRange, heads: Span, length: int) -> None:
        self._layers = layers
        self._heads = heads
        self._length = length
        self._covered_LCHS = numpy.zeros((len(layers), 2, heads[1] - heads[0], length), dtype=numpy.bool_)
        self._num_missing = self._covered_LCHS.size

    @property
    def num_missing(self) -> int:
        """Cells that have not landed."""
        return self._num_missing

    @property
    def is_complete(self) -> bool:
        """True when no cell is missing."""
        return self._num_missing == 0

    def holds(self, layers: LayerRange, heads: Span, positions: Span) -> bool:
        """True when the box is not empty and lies wholly within the row's cells."""
        return (
            self._layers.start <= layers.start
            and layers.stop <= self._layers.stop
            and self._heads[0] <= heads[0] < heads[1] <= self._heads[1]
            and 0 <= positions[0] < positions[1] <= self._length
        )

    def add(self, layers: LayerRange, heads: Span, positions: Span, kinds: Span = BOTH) -> int:
        """The box is covered; returns how many of its cells were not before. Raises ValueError outside the row."""
        if not self.holds(layers, heads, positions):
            raise ValueError(f"layers {layers} heads {heads} positions {positions} lie outside {self.words}")
        box = self._box(layers, heads, positions, kinds)
        num_new = int(box.size - numpy.count_nonzero(box))
        box[...] = True
        self._num_missing -= num_new
        return num_new

    def covers(self, layers: LayerRange, heads: Span, positions: Span, kinds: Span = BOTH) -> bool:
        """True when every cell of a box within the row has landed already."""
        return bool(self._box(layers, heads, positions, kinds).all())

    @property
    def whole_positions(self) -> int:
        """So many positions from 0 on have all their cells."""
        whole = self._covered_LCHS.all(axis=(0, 1, 2))
        return int(whole.size if whole.all() else whole.argmin())

    @property
    def words(self) -> str:
        """The row's cells and the first one that is missing, for an error message."""
        whole = f"layers [{self._layers.start},{self._layers.stop}) heads {list(self._heads)} length {self._length}"
        if self.is_complete:
            return f"{whole}, complete"
        layer, kind, head, position = numpy.argwhere(~self._covered_LCHS)[0].tolist()
        return (
            f"{whole}, {self._num_missing} cells missing, first layer {layer + self._layers.start} {'KV'[kind]} "
            f"head {head + self._heads[0]} position {position}"
        )

    def _box(
        self, layers: LayerRange, heads: Span, positions: Span, kinds: Span
    ) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.bool_]]:
        first_layer, first_head = self._layers.start, self._heads[0]
        return self._covered_LCHS[
            layers.start - first_layer : layers.stop - first_layer,
            kinds[0] : kinds[1],
            heads[0] - first_head : heads[1] - first_head,
            positions[0] : positions[1],
        ]
