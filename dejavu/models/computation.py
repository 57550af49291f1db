"""What a stage is to the engine: something that takes rows, fills their KV cells and gives what the next stage needs.

Shape legend in ``cache.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dejavu.kv.layout import LayerRange
from dejavu.models.cache import KvSink


class StageComputation(Protocol):
    """Layers [a, b) of a model: computed (``stage.py``) or only timed (``modelled_stage.py``). Single-threaded."""

    layers: LayerRange
    device: torch.device
    dtype: torch.dtype
    """Of hidden states."""

    def part(self, layers: LayerRange) -> StageComputation:
        """A stage of some of these layers; nothing is loaded. Raises ConfigError for layers that are not here."""

    @property
    def hidden_size(self) -> int:
        """E."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights really held."""

    def prompt(self, inputs: Tensor, lengths: Sequence[int], sink: KvSink) -> Tensor:
        """Hidden states [B, T, E] of right-padded fresh prompts; on the last stage float32 logits [B, V].

        ``inputs`` are token ids [B, T] on the first stage, else hidden states [B, T, E]; the logits are those at
        each row's last valid position.
        """

    def step(self, inputs: Tensor, positions: Sequence[int], sink: KvSink) -> Tensor:
        """Hidden states [B, 1, E] of one new token a row; on the last stage float32 logits [B, V].

        ``inputs`` are token ids [B, 1] or hidden states [B, 1, E]; ``positions[b]`` is the cell that row b writes,
        and 0 for a row of the slice that is not live.
        """
