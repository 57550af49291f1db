"""What level 3 of DéjàVuLib knows of the inference setup: who holds what, and which rows of a pool are meant."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dejavu.ids import Epoch
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.route import Holding, RowSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSetup:
    """Who streams what to whom, in one epoch: this side's holding and those of the other pipeline's stages."""

    cluster: str
    epoch: Epoch
    source: Holding
    targets: tuple[Holding, ...]
    layout: KvLayout

    def __post_init__(self) -> None:
        layers, heads = self.source.layers, self.source.heads
        if layers.stop > self.layout.num_layers or heads[1] > self.layout.num_kv_heads:
            raise ValueError(
                f"{self.source.owner} holds layers [{layers.start},{layers.stop}) heads {list(heads)}, "
                f"but the model is {self.layout.fingerprint}"
            )

    def source_of(self, layers: LayerRange) -> Holding:
        """The source's part of these layers. Raises ValueError for a layer that it does not hold."""
        held = self.source.layers
        for layer in (layers.start, layers.stop - 1):
            if layer not in held:
                raise ValueError(f"layer {layer} is not one of {self.source.owner}'s [{held.start}, {held.stop})")
        return replace(self.source, layers=layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRow:
    """Positions of a row and where in a pool it lies."""

    span: RowSpan
    row_index: int
