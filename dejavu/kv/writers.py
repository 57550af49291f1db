"""Where a layer's new K and V go: the sinks that the models call once per layer, in layer order.

Shape legend: B rows of a pass, H kv heads, T positions of a pass (1 in a step), S positions of a buffer, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dejavu.kv.pool import KvPool


class PromptWriter:
    """Writes each prompt row's valid part into its pool row at positions [0, length).

    ``on_layer``, if given, is called with each global layer that is in the pool.
    Raises ValueError for rows or lengths that the pool does not have.
    """

    def __init__(
        self,
        pool: KvPool,
        row_indices: Sequence[int],
        lengths: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        if len(row_indices) != len(lengths) or len(set(row_indices)) != len(row_indices):
            raise ValueError(f"rows {list(row_indices)} and lengths {list(lengths)} do not pair up one to one")
        for row_index, length in zip(row_indices, lengths, strict=True):
            _check_cell(pool, row_index, length - 1)
        self._pool = pool
        self._rows = list(zip(row_indices, lengths, strict=True))
        self._on_layer = on_layer

    def update(self, layer_index: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """The rows hold this layer's cells; returns the inputs, which a fresh prompt attends over."""
        pool_keys, pool_values = self._pool.keys(layer_index), self._pool.values(layer_index)
        for index, (row_index, length) in enumerate(self._rows):
            pool_keys[row_index, :, :length].copy_(keys_BHTD[index, :, :length])
            pool_values[row_index, :, :length].copy_(values_BHTD[index, :, :length])
        if self._on_layer is not None:
            self._on_layer(layer_index)
        return keys_BHTD, values_BHTD


class StepWriter:
    """Writes one cell for each live row of a contiguous slice of the pool, at the row's own position.

    ``live`` are indices within the slice; ``positions`` has an entry for each row of the slice, and only those of
    live rows are written to. A dead row's memory may already be somebody else's, so it is never touched.
    ``update`` returns views of the slice up to the largest of ``positions``, dead rows' entries included,
    because the mask of the pass is as wide. Index tensors are made once, for all layers of the step.

    Raises ValueError for rows or positions that the pool does not have.
    """

    def __init__(
        self, pool: KvPool, first_row: int, num_rows: int, live: Sequence[int], positions: Sequence[int]
    ) -> None:
        if len(positions) != num_rows:
            raise ValueError(f"{len(positions)} positions for a slice of {num_rows} rows")
        if len(set(live)) != len(live) or not all(0 <= index < num_rows for index in live):
            raise ValueError(f"live rows {list(live)} are not distinct indices into a slice of {num_rows} rows")
        for index, position in enumerate(positions):
            _check_cell(pool, first_row + index, position)
        self._pool = pool
        self._rows = slice(first_row, first_row + num_rows)
        self._stop = max(positions) + 1
        self._num_inputs = num_rows
        num_heads = pool.heads[1] - pool.heads[0]
        cells_RH = _first_cells(pool, self._rows, num_heads) + torch.tensor(positions)[:, None]
        self._inputs: Tensor | None = None
        if list(live) != list(range(num_rows)):
            live_index = torch.tensor(live, dtype=torch.int64)
            cells_RH = cells_RH[live_index]
            inputs_RH = live_index[:, None] * num_heads + torch.arange(num_heads)
            self._inputs = inputs_RH.reshape(-1).to(pool.device)
        self._cells = cells_RH.reshape(-1).to(pool.device)

    def update(self, layer_index: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Live rows hold this layer's new cell; returns views [B, H, S, D] of K and V to attend over."""
        pool_keys, pool_values = self._pool.keys(layer_index), self._pool.values(layer_index)
        self._write(pool_keys, keys_BHTD)
        self._write(pool_values, values_BHTD)
        return pool_keys[self._rows, :, : self._stop], pool_values[self._rows, :, : self._stop]

    def _write(self, buffer_RHSD: Tensor, new_BHTD: Tensor) -> None:
        head_dim = buffer_RHSD.shape[-1]
        # A wrong batch would still fit the flat indices below and write the wrong rows.
        if new_BHTD.shape[0] != self._num_inputs or new_BHTD.shape[2] != 1:
            raise ValueError(f"a step of {self._num_inputs} rows got cells of shape {tuple(new_BHTD.shape)}")
        cells = new_BHTD.reshape(-1, head_dim)
        if self._inputs is not None:
            cells = cells.index_select(0, self._inputs)
        # Twice as fast as assigning through three index tensors, at every layer of every step.
        buffer_RHSD.view(-1, head_dim).index_copy_(0, self._cells, cells)


class StreamingWriter:
    """Hands each prompt layer's K and V to ``on_layer(layer, keys_BHTD, values_BHTD)`` the moment they exist."""

    def __init__(self, on_layer: Callable[[int, Tensor, Tensor], None]) -> None:
        self._on_layer = on_layer

    def update(self, layer_index: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """The layer has been handed over; returns the inputs, which nobody may write to afterwards."""
        self._on_layer(layer_index, keys_BHTD, values_BHTD)
        return keys_BHTD, values_BHTD


def _first_cells(pool: KvPool, rows: slice, num_heads: int) -> Tensor:
    """Index of (row, head, position 0) in a layer's buffer seen as [R*H*S, D]: [rows, H]."""
    row_index = torch.arange(rows.start, rows.stop)[:, None]
    return (row_index * num_heads + torch.arange(num_heads)) * pool.layout.max_length


def _check_cell(pool: KvPool, row_index: int, position: int) -> None:
    if not (0 <= row_index < pool.num_rows and 0 <= position < pool.layout.max_length):
        raise ValueError(
            f"row {row_index} position {position} lies outside a pool of {pool.num_rows} rows "
            f"of {pool.layout.max_length} positions"
        )
