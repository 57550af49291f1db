"""The modules of one stage, built without memory and filled with the stage's own tensors only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dejavu.errors import ConfigError
from dejavu.kv.layout import LayerRange
from dejavu.models import attention, families
from dejavu.models.checkpoint import Checkpoint
from dejavu.models.families import Family
from dejavu.models.fused_layer import FusedLayer, can_fuse
from dejavu.models.packing import can_pack, pack_linears
from dejavu.models.spec import ModelSpec

HEAD = "lm_head"


def layer_part(layer_index: int) -> str:
    """Name of a layer among a stage's parts."""
    return f"layer.{layer_index}"


def load_parts(spec: ModelSpec, layers: LayerRange, device: torch.device, config: Any) -> dict[str, nn.Module]:
    """The stage's modules by name, filled, in evaluation mode, on ``device``; linear layers packed where that pays.

    Raises ConfigError where the checkpoint lacks a tensor or has another shape than the config says.
    """
    family = families.FAMILIES[spec.family]
    dtype: torch.dtype = getattr(torch, spec.dtype)
    skeleton = _build_on_meta(family, config, dtype)
    base = skeleton.get_submodule(family.base)
    first, last = layers.start == 0, layers.stop == spec.num_layers
    filler = _Filler(family=family, checkpoint=Checkpoint(Path(spec.folder)), dtype=dtype, device=device)
    parts: dict[str, nn.Module] = {}
    if first:
        parts |= filler.fill_named(base, (family.embedding, *family.first_extras))
    if family.uses_rotary:
        # Its frequencies are no weights: built on meta they would be garbage that nothing reports.
        rotary: Any = base.rotary_emb
        parts["rotary_emb"] = type(rotary)(config).to(device)
    fuses = _fuses(filler, base.get_submodule(family.layers), config)
    for layer in layers.indices:
        module = base.get_submodule(f"{family.layers}.{layer}")
        filler.fill(module, family.layer_tensor_prefix(layer))
        parts[layer_part(layer)] = _packed_layer(filler, module, config, fuses)
        # The skeleton lives until all layers are loaded; it may not keep what packing has copied.
        base.get_submodule(family.layers)[layer] = nn.Identity()  # type: ignore[operator]
    if last:
        parts |= filler.fill_named(base, (family.norm, *family.last_extras))
        parts[HEAD] = _head(filler, skeleton, config, parts.get(family.embedding))
    for part in parts.values():
        part.eval()
    return parts


def _build_on_meta(family: Family, config: Any, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    attention.register()
    # BLOOM's attention is written out in its own module, with a float mask.
    implementation = "eager" if family.uses_alibi else attention.ATTENTION_NAME
    with torch.device("meta"):
        # Always from the full config: a trimmed one changes values that layers read while they are made.
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)
    return model


def _fuses(filler: _Filler, layers: nn.Module, config: Any) -> bool:
    """True when all layers can be fused: one way of calling them serves a whole pass."""
    return filler.packs and filler.family.uses_rotary and all(can_fuse(layer, config) for layer in layers.children())


def _packed_layer(filler: _Filler, layer: nn.Module, config: Any, fuses: bool) -> nn.Module:
    if fuses:
        return FusedLayer(layer)
    return filler.packed(layer) if _may_pack(config) else layer


def _may_pack(config: Any) -> bool:
    # BLOOM's exact mode reads slices of the plain weights.
    return not (getattr(config, "slow_but_exact", False) and getattr(config, "pretraining_tp", 1) > 1)


def _head(filler: _Filler, skeleton: nn.Module, config: Any, embedding: nn.Module | None) -> nn.Module:
    """The head, tied or not. A packed one is a copy in its own order; else a tied one shares the embedding's table."""
    head = skeleton.get_submodule(HEAD)
    names = [f"{HEAD}.weight", filler.family.embedding_weight]
    if config.tie_word_embeddings:
        names.reverse()
        if embedding is not None and not filler.packs:
            head.weight = embedding.weight
            return head
    filler.fill(head, f"{HEAD}.", weight_names=names if config.tie_word_embeddings else names[:1])
    return filler.packed(head)


class _Filler:
    """Gives modules their tensors, one at a time."""

    def __init__(self, *, family: Family, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.family = family
        self.packs = can_pack(dtype, device)
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def fill_named(self, base: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
        """The named children of ``base`` that exist, filled; linear ones packed."""
        parts: dict[str, nn.Module] = {}
        for name in names:
            if isinstance(module := getattr(base, name, None), nn.Module):
                self.fill(module, f"{self.family.base}.{name}.")
                parts[name] = self.packed(module)
        return parts

    def fill(self, module: nn.Module, prefix: str, weight_names: Sequence[str] | None = None) -> None:
        """Every parameter of ``module`` holds its tensor; ``prefix`` starts their names in the checkpoint."""
        for name, parameter in list(module.named_parameters()):
            tensor = self._load(weight_names or [prefix + name], parameter.shape)
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
        left = [name for name, buffer in module.named_buffers() if buffer.is_meta]
        if left:
            raise ConfigError(f"model in {self._checkpoint.folder}: {prefix}{left[0]} has no value in this version")

    def packed(self, module: nn.Module) -> nn.Module:
        """``module`` with its linear layers packed, where packing works here."""
        return pack_linears(module) if self.packs else module

    def _load(self, names: Sequence[str], shape: torch.Size) -> Tensor:
        bare = [name.removeprefix(self.family.checkpoint_prefix) for name in names]
        found = self._checkpoint.find([*names, *bare])
        if found is None:
            raise ConfigError(f"model in {self._checkpoint.folder} holds no tensor {names[0]}")
        tensor = self._checkpoint.load(found)
        if tensor.shape != shape:
            raise ConfigError(
                f"model in {self._checkpoint.folder}: {found} has shape {tuple(tensor.shape)}, "
                f"config.json asks for {tuple(shape)}"
            )
        return tensor.to(device=self._device, dtype=self._dtype)
