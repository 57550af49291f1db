"""One stage [a, b) of a causal LM: builds and loads its own tensors only, and runs prompts and steps.

Shape legend in ``cache.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dejavu.errors import ConfigError
from dejavu.kv.layout import LayerRange
from dejavu.models import attention, families
from dejavu.models.cache import KvSink, SinkCache
from dejavu.models.fused_layer import FusedLayer, FusedPass
from dejavu.models.packing import held_bytes
from dejavu.models.spec import ModelSpec
from dejavu.models.stage_parts import HEAD, layer_part, load_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """What all layers share in one pass."""

    positions_BT: Tensor
    num_positions: int
    """S: cells that a row's mask covers."""
    mask_of: Callable[[int | None], Tensor | None]
    """From a layer's window to its mask."""


class StageModel:
    """Layers [a, b) of a model, with the embedding when first and the head when last. Single-threaded."""

    def __init__(
        self, *, spec: ModelSpec, layers: LayerRange, parts: Mapping[str, nn.Module], config: Any, device: torch.device
    ) -> None:
        self.spec = spec
        self.layers = layers
        self.device = device
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self._family = families.FAMILIES[spec.family]
        self._parts = parts
        self._config = config
        self._layers = [parts[layer_part(layer)] for layer in layers.indices]
        self._windows = [families.window_of(config, layer) for layer in layers.indices]
        self._slopes_H = attention.alibi_slopes(spec.num_heads, device) if self._family.uses_alibi else None

    @classmethod
    def load(cls, spec: ModelSpec, layers: LayerRange, device: str = "cpu") -> StageModel:
        """A stage ready to run, with weights of its own. Raises ConfigError where the checkpoint does not fit."""
        if layers.stop > spec.num_layers:
            raise ConfigError(f"layers [{layers.start}, {layers.stop}) of a model with {spec.num_layers} layers")
        config = families.read_config(Path(spec.folder))
        place = torch.device(device)
        return cls(spec=spec, layers=layers, parts=load_parts(spec, layers, place, config), config=config, device=place)

    def part(self, layers: LayerRange) -> StageModel:
        """A stage of some of these layers that shares this one's weights: nothing is loaded or copied.

        Raises ConfigError for layers that are not here, or an end of the model whose embedding or head is not.
        """
        inside = self.layers.start <= layers.start < layers.stop <= self.layers.stop
        if not inside:
            raise ConfigError(
                f"layers [{layers.start}, {layers.stop}) are not all among [{self.layers.start}, {self.layers.stop})"
            )
        return StageModel(spec=self.spec, layers=layers, parts=self._parts, config=self._config, device=self.device)

    @property
    def first(self) -> bool:
        """True when this stage embeds token ids."""
        return self.layers.start == 0

    @property
    def last(self) -> bool:
        """True when this stage gives logits."""
        return self.layers.stop == self.spec.num_layers

    @property
    def hidden_size(self) -> int:
        """E."""
        return self.spec.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights really held."""
        return held_bytes(self._parts.values())

    @torch.inference_mode()
    def prompt(self, inputs: Tensor, lengths: Sequence[int], sink: KvSink) -> Tensor:
        """Hidden states [B, T, E] of right-padded fresh prompts; on the last stage float32 logits [B, V].

        ``inputs`` are token ids [B, T] on the first stage, else hidden states [B, T, E]; the logits are those at
        each row's last valid position.
        """
        num_positions = inputs.shape[1]
        shared = _Pass(
            positions_BT=torch.arange(num_positions, device=self.device)[None, :],
            num_positions=num_positions,
            mask_of=lambda window: self._prompt_mask(num_positions, window),
        )
        hidden_BTE = self._run(inputs.to(self.device), shared, sink)
        if not self.last:
            return hidden_BTE
        rows = torch.arange(len(lengths), device=self.device)
        ends = torch.tensor(lengths, device=self.device) - 1
        return self._logits(hidden_BTE[rows, ends])

    @torch.inference_mode()
    def step(self, inputs: Tensor, positions: Sequence[int], sink: KvSink) -> Tensor:
        """Hidden states [B, 1, E] of one new token a row; on the last stage float32 logits [B, V].

        ``inputs`` are token ids [B, 1] or hidden states [B, 1, E]; ``positions[b]`` is the cell that row b writes.
        """
        positions_B = torch.tensor(positions, device=self.device)
        num_positions = max(positions) + 1
        shared = _Pass(
            positions_BT=positions_B[:, None],
            num_positions=num_positions,
            mask_of=lambda window: self._step_mask(positions_B, num_positions, window),
        )
        hidden_BTE = self._run(inputs.to(self.device), shared, sink)
        return self._logits(hidden_BTE[:, 0]) if self.last else hidden_BTE

    def _run(self, inputs: Tensor, shared: _Pass, sink: KvSink) -> Tensor:
        family = self._family
        hidden_BTE = families.embed(family, self._parts, inputs, shared.positions_BT) if self.first else inputs
        rotary = self._parts["rotary_emb"](hidden_BTE, shared.positions_BT) if family.uses_rotary else None
        masks = {window: shared.mask_of(window) for window in set(self._windows)}
        call = self._caller(shared, sink, rotary, len(inputs))
        for layer, window in zip(self._layers, self._windows, strict=True):
            hidden_BTE = call(layer, hidden_BTE, masks[window])
        return hidden_BTE

    def _caller(
        self, shared: _Pass, sink: KvSink, rotary: tuple[Tensor, Tensor] | None, batch: int
    ) -> Callable[[Any, Tensor, Tensor | None], Tensor]:
        """How a layer of this pass is called: hidden states and mask in, hidden states out."""
        if rotary is not None and all(isinstance(layer, FusedLayer) for layer in self._layers):
            one_pass = FusedPass.of(rotary, sink, shared.num_positions)
            return lambda layer, hidden_BTE, mask: layer.run(hidden_BTE, one_pass, mask)
        alibi = self._alibi(batch, shared.num_positions)
        cache = SinkCache(sink, shared.num_positions)
        return lambda layer, hidden_BTE, mask: families.call_layer(
            self._family,
            layer,
            hidden_BTE,
            mask=mask,
            cache=cache,
            positions_BT=shared.positions_BT,
            rotary=rotary,
            alibi=alibi,
        )

    def _logits(self, hidden_BE: Tensor) -> Tensor:
        # A strided input would take another matmul path with other roundings.
        hidden_BE = hidden_BE.contiguous()
        for part in (self._family.norm, *self._family.last_extras, HEAD):
            if part in self._parts:
                hidden_BE = self._parts[part](hidden_BE)
        return hidden_BE.float()

    def _alibi(self, batch: int, num_positions: int) -> Tensor | None:
        if self._slopes_H is None:
            return None
        return attention.alibi_bias(self._slopes_H, batch, num_positions, self.dtype)

    def _prompt_mask(self, num_positions: int, window: int | None) -> Tensor | None:
        if self._family.uses_alibi:
            return attention.additive(attention.causal_mask(num_positions, self.device), self.dtype)
        return attention.prompt_mask(num_positions, window, self.device)

    def _step_mask(self, positions_B: Tensor, num_positions: int, window: int | None) -> Tensor:
        mask = attention.step_mask(positions_B, num_positions, window)
        if self._family.uses_alibi:
            # BLOOM adds its mask to the scores: a bool one would be added as 0 and 1.
            return attention.additive(mask, self.dtype)
        # On a CPU every layer would turn a bool mask into this.
        return attention.additive(mask, torch.float32) if self.device.type == "cpu" else mask
