"""Routes over random cuts: layers, heads, rows and positions, cut differently on the two sides."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejavu.ids import RowId
from dejavu.kv.layout import LayerRange
from dejavu.kv.route import Holding, Move, RouteError, RowSpan, route, route_from

Cell = tuple[int, int, int, int]


def cuts(draw: st.DrawFn, stop: int, most: int) -> list[tuple[int, int]]:
    """[0, stop) in at most ``most`` uneven pieces."""
    inner = draw(st.sets(st.integers(1, stop - 1), max_size=most - 1)) if stop > 1 else set()
    edges = [0, *sorted(inner), stop]
    return list(itertools.pairwise(edges))


@st.composite
def sides(draw: st.DrawFn) -> tuple[list[Holding], list[Holding], list[RowSpan]]:
    num_layers, num_heads = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 3, 4]))
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    starts = draw(st.lists(st.integers(0, 4), min_size=len(lengths), max_size=len(lengths)))
    spans = [
        RowSpan(row_id=RowId(10 + index), length=length, start=start)
        for index, (length, start) in enumerate(zip(lengths, starts, strict=True))
    ]
    both = [_side(draw, name, num_layers, num_heads, spans) for name in ("s", "t")]
    return both[0], both[1], spans


def _side(draw: st.DrawFn, name: str, num_layers: int, num_heads: int, spans: list[RowSpan]) -> list[Holding]:
    longest = max(span.positions[1] for span in spans)
    batches = cuts(draw, len(spans), 3)
    by_rows = draw(st.booleans())
    holdings = []
    for batch in batches if by_rows else [(0, len(spans))]:
        rows = frozenset(span.row_id for span in spans[batch[0] : batch[1]]) if by_rows else None
        for layers in cuts(draw, num_layers, 4):
            for heads in cuts(draw, num_heads, 2):
                for positions in [None] if draw(st.booleans()) else cuts(draw, longest, 2):
                    holdings.append(
                        Holding(
                            owner=f"{name}{len(holdings)}",
                            layers=LayerRange(*layers),
                            heads=heads,
                            rows=rows,
                            positions=positions,
                        )
                    )
    return holdings


def cells(moves: Iterable[Move]) -> list[tuple[str, str, Cell]]:
    return [
        (move.source, move.target, (layer, head, move.row_id, position))
        for move in moves
        for layer in move.layers.indices
        for head in range(*move.heads)
        for position in range(*move.positions)
    ]


def owner_of(cell: Cell, holdings: Sequence[Holding]) -> str:
    layer, head, row_id, position = cell
    owners = [
        holding.owner
        for holding in holdings
        if layer in holding.layers
        and holding.heads[0] <= head < holding.heads[1]
        and (holding.rows is None or row_id in holding.rows)
        and (holding.positions is None or holding.positions[0] <= position < holding.positions[1])
    ]
    (owner,) = owners
    return owner


@given(sides())
def test_every_kv_cell_moves_exactly_once(setup: tuple[list[Holding], list[Holding], list[RowSpan]]) -> None:
    sources, targets, spans = setup
    num_layers = max(holding.layers.stop for holding in sources)
    num_heads = max(holding.heads[1] for holding in sources)
    moved = cells(route(sources, targets, spans))
    wanted = Counter(
        (layer, head, span.row_id, position)
        for span in spans
        for layer in range(num_layers)
        for head in range(num_heads)
        for position in range(*span.positions)
    )
    assert Counter(cell for _, _, cell in moved) == wanted
    for source, target, cell in moved:
        assert source == owner_of(cell, sources)
        assert target == owner_of(cell, targets)


@given(sides())
def test_routes_of_each_source_alone_are_the_whole_route(
    setup: tuple[list[Holding], list[Holding], list[RowSpan]],
) -> None:
    sources, targets, spans = setup
    alone = [cell for source in sources for cell in cells(route_from(source, targets, spans))]
    assert Counter(alone) == Counter(cells(route(sources, targets, spans)))


@given(sides(), st.data())
def test_a_holding_that_is_missing_on_either_side_is_refused(
    setup: tuple[list[Holding], list[Holding], list[RowSpan]], data: st.DataObject
) -> None:
    sources, targets, spans = setup
    side = data.draw(st.sampled_from([sources, targets]))
    holding = data.draw(st.sampled_from([one for one in side if any(one.box(span) for span in spans)]))
    side.remove(holding)
    with pytest.raises(RouteError, match=r"is wanted by no target|is held by no source"):
        route(sources, targets, spans)


@given(sides(), st.data())
def test_a_holding_that_appears_twice_on_either_side_is_refused(
    setup: tuple[list[Holding], list[Holding], list[RowSpan]], data: st.DataObject
) -> None:
    sources, targets, spans = setup
    side = data.draw(st.sampled_from([sources, targets]))
    side.append(data.draw(st.sampled_from([one for one in side if any(one.box(span) for span in spans)])))
    with pytest.raises(RouteError, match="both hold"):
        route(sources, targets, spans)
