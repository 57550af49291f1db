"""What a KV cache is made of: layers, heads, positions, bytes; and the fingerprint that peers compare.

Shape legend used in this package: B rows of a pass, R rows of a pool, H kv heads, T positions of a pass,
S positions of a buffer, D head_dim.
"""

from __future__ import annotations

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class LayerRange(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Global layer numbers [start, stop)."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"layer range [{self.start}, {self.stop}) is empty or negative")

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.start <= layer < self.stop

    @property
    def indices(self) -> range:
        """The global layer numbers, ascending."""
        return range(self.start, self.stop)


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of a whole model: what two peers must agree on before a byte of KV moves."""

    model_hash: str
    """Digest of the model's config and weights' identity."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    max_length: int
    """Positions of a row's buffer: prompt and new tokens together."""

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def position_bytes(self) -> int:
        """Bytes of K and V of one position in one layer, all heads."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def row_bytes(self, num_layers: int) -> int:
        """Bytes of one whole row's buffer over ``num_layers`` layers."""
        return num_layers * self.max_length * self.position_bytes

    @property
    def fingerprint(self) -> str:
        """One line that two peers compare; it reads well in an error message."""
        return (
            f"model={self.model_hash[:12]} layers={self.num_layers} heads={self.num_kv_heads} "
            f"head_dim={self.head_dim} dtype={self.dtype} max_length={self.max_length}"
        )
