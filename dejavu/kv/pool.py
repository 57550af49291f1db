"""The buffers that attention reads: for each layer of a stage, K and V of a fixed number of rows.

Shape legend: L layers, C the pair (K, V), R rows of a pool, H kv heads, S positions of a buffer, D head_dim.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from dejavu.kv.box import Span
from dejavu.kv.layout import KvLayout, LayerRange

TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KvPool:
    """K and V of ``num_rows`` rows for ``layers``, zeroed and, unless ``memory`` is given, backed by real pages.

    They start as zeros because a NaN in a masked cell would poison its row (0 times NaN), and touched because a
    fresh page costs several times a copy. All layers share one storage ``cells_LCRHSD``, so that a row or a step
    of all layers is one strided slice; each layer's own [R, H, S, D] is contiguous.

    ``memory`` is zeroed uint8 memory on the device to use, where somebody has made it ready before; it is only used
    when it is large enough. Raises ValueError when the layers or heads are not the layout's.
    """

    def __init__(
        self,
        layout: KvLayout,
        layers: LayerRange,
        num_rows: int,
        device: str = "cpu",
        *,
        heads: Span | None = None,
        memory: Tensor | None = None,
    ) -> None:
        if layers.stop > layout.num_layers:
            raise ValueError(f"layers [{layers.start}, {layers.stop}) go beyond the model's {layout.num_layers}")
        if num_rows < 1:
            raise ValueError(f"a pool of {num_rows} rows holds nothing")
        self.layout = layout
        self.layers = layers
        self.num_rows = num_rows
        self.heads = _checked_heads(layout, heads)
        shape = (len(layers), 2, num_rows, self.heads[1] - self.heads[0], layout.max_length, layout.head_dim)
        num_bytes = math.prod(shape) * layout.dtype_bytes
        if memory is None or memory.numel() < num_bytes:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
        self.cells_LCRHSD = memory[:num_bytes].view(TORCH_DTYPES[layout.dtype]).view(shape)
        self._keys_RHSD = [self.cells_LCRHSD[index, 0] for index in range(len(layers))]
        self._values_RHSD = [self.cells_LCRHSD[index, 1] for index in range(len(layers))]

    @staticmethod
    def room(layout: KvLayout, num_layers: int, num_rows: int, device: str = "cpu", *, pin: bool = False) -> Tensor:
        """Zeroed memory, backed by real pages, for a pool of so many layers and rows: uint8.

        ``pin`` makes it page-locked, for copies to and from a CUDA device.
        """
        num_bytes = num_rows * layout.row_bytes(num_layers)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pin).zero_()

    def cell_bytes(self, layers: LayerRange, heads: Span) -> int:
        """Bytes of K and V of one position in those layers and heads."""
        return len(layers) * 2 * (heads[1] - heads[0]) * self.layout.head_dim * self.layout.dtype_bytes

    def keys(self, layer: int) -> Tensor:
        """K of a layer, by its global number: [R, H, S, D]. Raises IndexError for a layer of another stage."""
        return self._keys_RHSD[self._local(layer)]

    def values(self, layer: int) -> Tensor:
        """V of a layer, by its global number: [R, H, S, D]. Raises IndexError for a layer of another stage."""
        return self._values_RHSD[self._local(layer)]

    @property
    def device(self) -> torch.device:
        """Where the buffers lie."""
        return self.cells_LCRHSD.device

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.cells_LCRHSD.nbytes

    @staticmethod
    def pool_bytes(layout: KvLayout, layers: LayerRange, num_rows: int) -> int:
        """Bytes that such a pool (all heads) will take, for planning."""
        return num_rows * layout.row_bytes(len(layers))

    def cells(self, row_index: int, layers: LayerRange, heads: Span, positions: Span) -> Tensor:
        """The view [L, C, H, T, D] of one row's cells; global layers and heads. Raises IndexError outside the pool."""
        self._local(layers.start)
        self._local(layers.stop - 1)
        inside = (
            0 <= row_index < self.num_rows
            and self.heads[0] <= heads[0] < heads[1] <= self.heads[1]
            and 0 <= positions[0] < positions[1] <= self.layout.max_length
        )
        if not inside:
            raise IndexError(
                f"row {row_index} heads {list(heads)} positions {list(positions)} lie outside a pool of "
                f"{self.num_rows} rows, heads {list(self.heads)}, {self.layout.max_length} positions"
            )
        return self.cells_LCRHSD[
            layers.start - self.layers.start : layers.stop - self.layers.start,
            :,
            row_index,
            heads[0] - self.heads[0] : heads[1] - self.heads[0],
            positions[0] : positions[1],
        ]

    def _local(self, layer: int) -> int:
        if layer not in self.layers:
            raise IndexError(f"layer {layer} is not one of this pool's [{self.layers.start}, {self.layers.stop})")
        return layer - self.layers.start


def _checked_heads(layout: KvLayout, heads: Span | None) -> Span:
    if heads is None:
        return 0, layout.num_kv_heads
    if not 0 <= heads[0] < heads[1] <= layout.num_kv_heads:
        raise ValueError(f"heads [{heads[0]}, {heads[1]}) are not within the model's {layout.num_kv_heads}")
    return heads
