"""Routes whose answer can be written down, and refusals that must name both sides."""

from __future__ import annotations

import pytest

from dejavu.ids import RowId
from dejavu.kv.layout import LayerRange
from dejavu.kv.route import Holding, Move, RouteError, RowSpan, route, route_from

ROW = RowSpan(row_id=RowId(1), length=4)


def holding(owner: str, start: int, stop: int, heads: tuple[int, int] = (0, 2)) -> Holding:
    return Holding(owner=owner, layers=LayerRange(start, stop), heads=heads)


def test_uneven_layer_ranges_are_cut_where_the_two_sides_meet() -> None:
    moves = route([holding("p0", 0, 4), holding("p1", 4, 5)], [holding("t0", 0, 2), holding("t1", 2, 5)], [ROW])
    assert [(move.source, move.target, move.layers) for move in moves] == [
        ("p0", "t0", LayerRange(0, 2)),
        ("p0", "t1", LayerRange(2, 4)),
        ("p1", "t1", LayerRange(4, 5)),
    ]


def test_a_step_of_one_position_moves_only_that_position() -> None:
    step = RowSpan(row_id=RowId(3), length=1, start=9)
    assert route_from(holding("a", 0, 2), [holding("b", 0, 5)], [step]) == (
        Move(source="a", target="b", row_id=RowId(3), layers=LayerRange(0, 2), heads=(0, 2), positions=(9, 10)),
    )


def test_rows_of_one_batch_go_to_the_owners_of_their_token_batches() -> None:
    rows = [RowSpan(row_id=RowId(index), length=1) for index in range(3)]
    targets = [
        Holding(owner="t0", layers=LayerRange(0, 1), heads=(0, 1), rows=frozenset({RowId(0), RowId(2)})),
        Holding(owner="t1", layers=LayerRange(0, 1), heads=(0, 1), rows=frozenset({RowId(1)})),
    ]
    moves = route([holding("p", 0, 1, (0, 1))], targets, rows)
    assert [(move.row_id, move.target) for move in moves] == [(0, "t0"), (1, "t1"), (2, "t0")]


def test_a_layer_that_nobody_wants_is_refused_with_both_sides() -> None:
    with pytest.raises(RouteError) as caught:
        route_from(holding("p0", 0, 5), [holding("t0", 0, 2), holding("t1", 3, 5)], [ROW])
    message = str(caught.value)
    assert "layers [2,3)" in message
    assert "p0 (layers [0,5)" in message
    assert "t0 (layers [0,2)" in message


def test_a_layer_that_two_targets_want_is_refused_with_both_names() -> None:
    with pytest.raises(RouteError, match=r"targets t0 .* and t1 .* both hold layers \[1,2\)"):
        route_from(holding("p0", 0, 3), [holding("t0", 0, 2), holding("t1", 1, 3)], [ROW])


def test_a_target_layer_without_a_source_is_refused_only_by_the_whole_route() -> None:
    source, target = holding("p0", 0, 2), holding("t0", 0, 3)
    assert len(route_from(source, [target], [ROW])) == 1
    with pytest.raises(RouteError, match=r"layers \[2,3\) .* of t0 .* is held by no source"):
        route([source], [target], [ROW])


def test_a_row_given_twice_is_refused() -> None:
    with pytest.raises(RouteError, match="row 1 is given twice"):
        route([holding("p", 0, 1)], [holding("t", 0, 1)], [ROW, ROW])


def test_empty_spans_and_ranges_are_refused() -> None:
    with pytest.raises(ValueError, match="0 positions"):
        RowSpan(row_id=RowId(1), length=0)
    with pytest.raises(ValueError, match=r"heads \[2, 2\)"):
        holding("p", 0, 1, (2, 2))
