"""Who sends which cells to whom: pure, by global layer number, so that two depths can never be paired by position.

A cell is (global layer, K or V, row, head, position); K and V travel together. What a worker holds is a
``Holding``; a batch of rows is a sequence of ``RowSpan``; the answer is a tuple of ``Move``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dejavu.errors import DejavuError
from dejavu.ids import RowId
from dejavu.kv.box import Box, Span, intersect, intersect_spans, subtract_all
from dejavu.kv.layout import LayerRange


class RouteError(DejavuError):
    """The two sides do not fit: a cell would move never, or twice. The message names both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The cells that ``owner`` holds: a layer range, a head range, and all rows and positions unless it says which."""

    owner: str
    layers: LayerRange
    heads: Span
    rows: frozenset[RowId] | None = None
    positions: Span | None = None

    def __post_init__(self) -> None:
        for name, span in (("heads", self.heads), ("positions", self.positions)):
            if span is not None and not 0 <= span[0] < span[1]:
                raise ValueError(f"{self.owner}: {name} [{span[0]}, {span[1]}) is empty or negative")

    def box(self, span: RowSpan) -> Box | None:
        """The cells of ``span`` that are held here, or None."""
        if self.rows is not None and span.row_id not in self.rows:
            return None
        positions = span.positions if self.positions is None else intersect_spans(self.positions, span.positions)
        return None if positions is None else ((self.layers.start, self.layers.stop), self.heads, positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpan:
    """Positions [start, start + length) of one row."""

    row_id: RowId
    length: int
    start: int = 0

    def __post_init__(self) -> None:
        if self.length < 1 or self.start < 0:
            raise ValueError(f"row {self.row_id}: {self.length} positions from {self.start} on are empty or negative")

    @property
    def positions(self) -> Span:
        """[start, stop)."""
        return self.start, self.start + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """K and V of these cells of one row go from ``source`` to ``target``."""

    source: str
    target: str
    row_id: RowId
    layers: LayerRange
    heads: Span
    positions: Span


def route(sources: Sequence[Holding], targets: Sequence[Holding], spans: Sequence[RowSpan]) -> tuple[Move, ...]:
    """Every cell of the rows that either side holds moves exactly once.

    Raises RouteError where two sources or two targets hold the same cell, or one side lacks a cell of the other.
    """
    _refuse_repeated_rows(spans)
    moves: list[Move] = []
    for span in spans:
        held, wanted = _boxes(sources, span), _boxes(targets, span)
        _refuse_overlap("sources", span, held)
        moves += _pair(span, held, wanted)
        _refuse_gap(span, wanted, held, "is held by no source")
    return tuple(moves)


def route_from(source: Holding, targets: Sequence[Holding], spans: Sequence[RowSpan]) -> tuple[Move, ...]:
    """Every cell of the rows that ``source`` holds moves exactly once; targets may want more from others.

    Raises RouteError where two targets hold the same cell or none holds one of the source's.
    """
    _refuse_repeated_rows(spans)
    return tuple(move for span in spans for move in _pair(span, _boxes((source,), span), _boxes(targets, span)))


_Held = tuple[str, Box]


def _boxes(holdings: Sequence[Holding], span: RowSpan) -> list[_Held]:
    return [(holding.owner, box) for holding in holdings if (box := holding.box(span)) is not None]


def _pair(span: RowSpan, held: list[_Held], wanted: list[_Held]) -> Iterator[Move]:
    _refuse_overlap("targets", span, wanted)
    _refuse_gap(span, held, wanted, "is wanted by no target")
    for source, source_box in held:
        for target, target_box in wanted:
            shared = intersect(source_box, target_box)
            if shared is not None:
                layers, heads, positions = shared
                yield Move(
                    source=source,
                    target=target,
                    row_id=span.row_id,
                    layers=LayerRange(*layers),
                    heads=heads,
                    positions=positions,
                )


def _refuse_repeated_rows(spans: Sequence[RowSpan]) -> None:
    seen: dict[RowId, RowSpan] = {}
    for span in spans:
        if span.row_id in seen:
            raise RouteError(f"row {span.row_id} is given twice: {seen[span.row_id].positions} and {span.positions}")
        seen[span.row_id] = span


def _refuse_overlap(side: str, span: RowSpan, boxes: list[_Held]) -> None:
    for index, (owner, box) in enumerate(boxes):
        for other_owner, other in boxes[:index]:
            shared = intersect(box, other)
            if shared is not None:
                raise RouteError(
                    f"row {span.row_id}: {side} {other_owner} ({_words(other)}) and {owner} ({_words(box)}) "
                    f"both hold {_words(shared)}"
                )


def _refuse_gap(span: RowSpan, boxes: list[_Held], others: list[_Held], lack: str) -> None:
    for owner, box in boxes:
        missing = subtract_all(box, [other for _, other in others])
        if missing:
            there = "; ".join(f"{name} ({_words(other)})" for name, other in others) or "nobody"
            raise RouteError(
                f"row {span.row_id}: {_words(missing[0])} of {owner} ({_words(box)}) {lack}; there: {there}"
            )


def _words(box: Box) -> str:
    return " ".join(
        f"{name} [{start},{stop})" for name, (start, stop) in zip(("layers", "heads", "positions"), box, strict=True)
    )
