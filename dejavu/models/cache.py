"""Where a stage's keys and values go: the sink that the engine gives, and what transformers' layers see of it.

Shape legend of this package: B rows of a pass, H kv heads, T positions of a pass, S positions of a buffer,
D head_dim, E hidden_size, V vocab_size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class KvSink(Protocol):
    """Takes the new cells of one pass, layer by layer in ascending order of the global layer number."""

    def update(self, layer_index: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """The cells are kept; returns the keys and values to attend over.

        Keys come with rotary positions applied. For a fresh prompt the answer is the inputs themselves. For a step
        (T = 1) it is views [B, H, S, D] that hold the new cells too, S at least the largest position + 1; cells
        past a row's position are never attended to but must be finite.
        """


class SinkCache:
    """What an attention layer of transformers takes for its cache: it has ``update`` and nothing more.

    The layers of a stage keep their global ``layer_idx``, so no index is translated here.
    """

    __slots__ = ("_num_positions", "_sink")

    def __init__(self, sink: KvSink, num_positions: int) -> None:
        self._sink = sink
        self._num_positions = num_positions

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """The sink has the cells; returns keys and values cut to the positions that the pass's mask covers."""
        keys_BHSD, values_BHSD = self._sink.update(layer_idx, key_states, value_states)
        return keys_BHSD[:, :, : self._num_positions], values_BHSD[:, :, : self._num_positions]
