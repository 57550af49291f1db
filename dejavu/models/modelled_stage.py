"""A stage of a rehearsal: it waits for as long as its layers would compute, and its KV cells are real.

Its tokens are no text, but they hang on all that a repair must bring back: a cell is made from its token, position
and layer; every pass reads one cell of each layer for each row; and what it read decides the next token. A row that
lost a cell, or got another row's, goes on with other tokens.

Shape legend in ``cache.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from dejavu.errors import ConfigError
from dejavu.kv.layout import LayerRange
from dejavu.models.cache import KvSink
from dejavu.models.modelled_times import ModelledTimes
from dejavu.models.pace import Pace
from dejavu.models.spec import ModelSpec

_BASE = 64
_DIGITS = 4
"""A token id travels as so many digits: bfloat16 holds whole numbers exactly up to 256 only."""
_READ_CHANNEL = _DIGITS
_CELL_RANGE = 61
_MOST_TOKENS = 512
"""Tokens come out of the first so many ids: a row of logits for a whole vocabulary would cost more than it tells."""
_UNLIKELY = -1e4
"""The logit of every other token: no draw chooses it, and unlike minus infinity it can be written into an answer."""


class ModelledStage:
    """Layers [a, b) of a model that is only timed. Holds no weights. Single-threaded."""

    def __init__(self, *, spec: ModelSpec, layers: LayerRange, times: ModelledTimes, pace: Pace) -> None:
        if layers.stop > spec.num_layers:
            raise ConfigError(f"layers [{layers.start}, {layers.stop}) of a model with {spec.num_layers} layers")
        self.layers = layers
        self.device = torch.device("cpu")
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self._spec = spec
        self._times = times
        self._pace = pace
        self._share = spec.share(layers)

    def part(self, layers: LayerRange) -> ModelledStage:
        """A stage of some of these layers at the same pace. Raises ConfigError for layers that are not here."""
        if not self.layers.start <= layers.start < layers.stop <= self.layers.stop:
            raise ConfigError(
                f"layers [{layers.start}, {layers.stop}) are not all among [{self.layers.start}, {self.layers.stop})"
            )
        return ModelledStage(spec=self._spec, layers=layers, times=self._times, pace=self._pace)

    @property
    def hidden_size(self) -> int:
        """E."""
        return self._spec.hidden_size

    @property
    def weight_bytes(self) -> int:
        """None are held."""
        return 0

    @torch.inference_mode()
    def prompt(self, inputs: Tensor, lengths: Sequence[int], sink: KvSink) -> Tensor:
        """See ``StageComputation``; the sink has each layer when its time has come, and the stage has waited."""
        seconds = self._times.prompt_s(len(lengths), max(lengths), self._share.layers)
        began_s = self._pace.begin(seconds)
        hidden_BTE = self._embedded(inputs)
        rows, ends_B = torch.arange(len(lengths)), torch.tensor(lengths) - 1
        cells = self._cells(hidden_BTE, torch.arange(hidden_BTE.shape[1]))
        read: list[Tensor] = []
        for number, layer in enumerate(self.layers.indices, 1):
            read.append(self._update(layer, cells[number - 1], (rows, ends_B), sink))
            self._pace.wait(began_s + seconds * number / len(self.layers))
        hidden_BTE[rows, ends_B, _READ_CHANNEL] = self._all_read(hidden_BTE[rows, ends_B], read)
        output = self._output(hidden_BTE, hidden_BTE[rows, ends_B], ends_B)
        self._pace.end(began_s, seconds)
        return output

    @torch.inference_mode()
    def step(self, inputs: Tensor, positions: Sequence[int], sink: KvSink) -> Tensor:
        """See ``StageComputation``; the stage has waited."""
        seconds = self._times.step_s(len(positions), max(positions), self._share)
        began_s = self._pace.begin(seconds)
        hidden_B1E = self._embedded(inputs)
        rows, positions_B = torch.arange(len(positions)), torch.tensor(positions)
        cells = self._cells(hidden_B1E, positions_B[:, None])
        read = [
            self._update(layer, cell, (rows, positions_B), sink)
            for layer, cell in zip(self.layers.indices, cells, strict=True)
        ]
        hidden_B1E[:, 0, _READ_CHANNEL] = self._all_read(hidden_B1E[:, 0], read)
        output = self._output(hidden_B1E, hidden_B1E[:, 0], positions_B)
        self._pace.end(began_s, seconds)
        return output

    def _embedded(self, inputs: Tensor) -> Tensor:
        """Hidden states of our own: of token ids on the first stage, else a copy."""
        if self.layers.start > 0:
            return inputs.clone()
        hidden_BTE = torch.zeros(*inputs.shape, self.hidden_size, dtype=self.dtype)
        for digit in range(_DIGITS):
            hidden_BTE[..., digit] = (inputs // _BASE**digit % _BASE).to(self.dtype)
        return hidden_BTE

    def _cells(self, hidden_BTE: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """K and V [B, H, T, D] of each layer, a cell filled with its code. ``positions`` are as wide as [B, T]."""
        layers_L11 = torch.tensor(self.layers.indices)[:, None, None]
        keys_LBT = (_tokens(hidden_BTE) * 1_000_003 + positions * 8_191 + layers_L11 * 131) % _CELL_RANGE
        values_LBT = (keys_LBT * keys_LBT + layers_L11 + 1) % _CELL_RANGE
        shape = (-1, -1, self._spec.num_kv_heads, -1, self._spec.head_dim)
        keys, values = (
            codes_LBT.to(self.dtype)[:, :, None, :, None].expand(*shape).unbind()
            for codes_LBT in (keys_LBT, values_LBT)
        )
        return list(zip(keys, values, strict=True))

    def _update(self, layer: int, cells: tuple[Tensor, Tensor], ends: tuple[Tensor, Tensor], sink: KvSink) -> Tensor:
        """The layer's cells are with the sink. Returns the element that each row reads there, [B]."""
        read_BHSD = sink.update(layer, *cells)[layer % 2]
        rows, ends_B = ends
        return read_BHSD[rows, -1, (ends_B * 37 + layer) % (ends_B + 1), -1]

    def _all_read(self, last_BE: Tensor, read: Sequence[Tensor]) -> Tensor:
        """What the rows have read until after this stage, [B]: whole numbers, the same however the layers are cut."""
        weights_L1 = torch.tensor(self.layers.indices)[:, None] + 1
        total_B = last_BE[:, _READ_CHANNEL].long() + (torch.stack(list(read)).long() * weights_L1).sum(0)
        return (total_B % _CELL_RANGE).to(self.dtype)

    def _output(self, hidden_BTE: Tensor, last_BE: Tensor, positions_B: Tensor) -> Tensor:
        if self.layers.stop < self._spec.num_layers:
            return hidden_BTE
        num_tokens = min(self._spec.vocab_size, _MOST_TOKENS)
        logits_BV = torch.full((len(last_BE), num_tokens), _UNLIKELY)
        state = (_tokens(last_BE).tolist(), positions_B.tolist(), last_BE[:, _READ_CHANNEL].long().tolist())
        for row, (token, position, read) in enumerate(zip(*state, strict=True)):
            logits_BV[row, next_token(token, position, read, num_tokens, self._spec.eos_token_ids)] = 0.0
        return logits_BV


def next_token(token: int, position: int, read: int, num_tokens: int, avoid: Collection[int]) -> int:
    """The id that follows ``token`` at ``position``, given what the row has read; none of ``avoid``, if others are."""
    mixed = (token * 0x9E3779B1 + position * 0x85EBCA77 + read * 0xC2B2AE3D + 1) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    first = (mixed >> 12) % num_tokens
    candidates = ((first + offset) % num_tokens for offset in range(num_tokens))
    return next((candidate for candidate in candidates if candidate not in avoid), first)


def _tokens(hidden: Tensor) -> Tensor:
    """Token ids [...] out of hidden states [..., E]."""
    digits = hidden[..., :_DIGITS].long()
    return (digits * torch.tensor([_BASE**digit for digit in range(_DIGITS)])).sum(-1)
