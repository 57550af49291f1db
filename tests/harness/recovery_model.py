"""A language model on paper: cells are numbers, and a token depends on every cell before it in every layer."""

from __future__ import annotations

import itertools
from collections import defaultdict

from dejavu.control.ending import Limits, ending
from dejavu.kv.layout import LayerRange

VOCAB_SIZE = 997
EOS = tuple(range(0, VOCAB_SIZE, 12))
_MISSING = -1

RowCells = dict[int, dict[int, int]]
"""By layer, by position."""


def empty_row() -> RowCells:
    """A row without a cell."""
    return defaultdict(dict)


def compute(cells: RowCells, layers: LayerRange, position: int, activation: int) -> int:
    """The activation after these layers; their cells at the position are written, all before it are read."""
    for layer in layers.indices:
        cells[layer][position] = hash((layer, position, activation))
        activation = hash((activation, *(cells[layer].get(before, _MISSING) for before in range(position + 1))))
    return activation


def whole_length(cells: RowCells, layers: LayerRange) -> int:
    """So many positions from 0 on are there in every one of the layers."""
    length = 0
    while all(length in cells[layer] for layer in layers.indices):
        length += 1
    return length


def part(cells: RowCells, layers: LayerRange, start: int, stop: int) -> RowCells:
    """A copy of positions [start, stop); raises KeyError where a cell is not there."""
    return {layer: {position: cells[layer][position] for position in range(start, stop)} for layer in layers.indices}


def right_cells(num_layers: int, sequence: list[int]) -> RowCells:
    """The cells of a sequence, as one undisturbed worker computes them."""
    cells = empty_row()
    for position, token in enumerate(sequence):
        compute(cells, LayerRange(0, num_layers), position, token)
    return cells


def right_tokens(num_layers: int, prompt: list[int], limits: Limits) -> list[int]:
    """The tokens that a request must get."""
    cells, sequence = empty_row(), list(prompt)
    for position in itertools.count():
        token = compute(cells, LayerRange(0, num_layers), position, sequence[position]) % VOCAB_SIZE
        if position >= len(prompt) - 1:
            sequence.append(token)
            if ending(token, len(sequence) - len(prompt), limits) is not None:
                return sequence[len(prompt) :]
    raise AssertionError("unreachable")
