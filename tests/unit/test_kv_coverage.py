"""Coverage counts cells once, whatever comes twice."""

from __future__ import annotations

import pytest

from dejavu.kv.coverage import Coverage
from dejavu.kv.layout import LayerRange


def test_coverage_is_complete_only_with_the_last_cell() -> None:
    coverage = Coverage(LayerRange(2, 4), (0, 2), 3)
    assert coverage.add(LayerRange(2, 4), (0, 2), (0, 2)) == 16
    assert not coverage.is_complete
    assert coverage.add(LayerRange(2, 4), (0, 1), (2, 3)) == 4
    assert coverage.add(LayerRange(2, 3), (1, 2), (2, 3)) == 2
    assert coverage.num_missing == 2
    assert coverage.add(LayerRange(3, 4), (1, 2), (2, 3), (0, 1)) == 1
    assert "first layer 3 V head 1 position 2" in coverage.words
    assert coverage.add(LayerRange(3, 4), (1, 2), (2, 3)) == 1
    assert coverage.is_complete
    assert "complete" in coverage.words


def test_repeated_and_overlapping_boxes_count_their_new_cells_only() -> None:
    coverage = Coverage(LayerRange(0, 1), (0, 1), 10)
    assert coverage.add(LayerRange(0, 1), (0, 1), (0, 6)) == 12
    assert coverage.add(LayerRange(0, 1), (0, 1), (0, 6)) == 0
    assert coverage.covers(LayerRange(0, 1), (0, 1), (2, 4))
    assert coverage.add(LayerRange(0, 1), (0, 1), (4, 10)) == 8


def test_a_box_outside_the_row_is_refused_and_covers_nothing() -> None:
    coverage = Coverage(LayerRange(1, 2), (0, 2), 4)
    for layers, heads, positions in (
        (LayerRange(0, 2), (0, 2), (0, 4)),
        (LayerRange(1, 2), (0, 3), (0, 4)),
        (LayerRange(1, 2), (1, 1), (0, 4)),
        (LayerRange(1, 2), (0, 2), (0, 5)),
    ):
        with pytest.raises(ValueError, match="lie outside layers"):
            coverage.add(layers, heads, positions)
    assert coverage.num_missing == 16
