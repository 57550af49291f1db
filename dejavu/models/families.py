"""The supported model families: where transformers keeps the parts of each, and how its layers are called.

Only this file, ``stage.py``, ``stage_parts.py``, ``fused_layer.py`` and ``attention.py`` know transformers'
internals (5.24).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejavu.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names of a family's parts inside its ``...ForCausalLM`` module."""

    name: str
    base: str
    """Path from the causal LM to the module that holds embedding, layers and norm."""
    checkpoint_prefix: str
    """What checkpoints of the bare base model leave out of every tensor name."""
    layers: str
    embedding: str
    first_extras: tuple[str, ...] = ()
    """Parts that only the first stage needs, beside the embedding; a part may be absent or None."""
    last_extras: tuple[str, ...] = ()
    """Parts between norm and head that only the last stage needs; a part may be absent or None."""
    norm: str
    attention: str
    learned_positions: str | None = None
    uses_rotary: bool = False
    uses_alibi: bool = False

    def layer_tensor_prefix(self, layer_index: int) -> str:
        """Start of the checkpoint names of a layer's tensors."""
        return f"{self.base}.{self.layers}.{layer_index}."

    @property
    def embedding_weight(self) -> str:
        """Checkpoint name of the embedding table (and of a tied head)."""
        return f"{self.base}.{self.embedding}.weight"


def _rotary(name: str) -> Family:
    return Family(
        name=name, base="model", checkpoint_prefix="model.", layers="layers", embedding="embed_tokens", norm="norm",
        attention="self_attn", uses_rotary=True,
    )  # fmt: skip


_GPT2 = Family(
    name="gpt2", base="transformer", checkpoint_prefix="transformer.", layers="h", embedding="wte",
    first_extras=("wpe",), norm="ln_f", attention="attn", learned_positions="wpe",
)  # fmt: skip
_OPT = Family(
    name="opt", base="model.decoder", checkpoint_prefix="model.", layers="layers", embedding="embed_tokens",
    first_extras=("embed_positions", "project_in"), last_extras=("project_out",), norm="final_layer_norm",
    attention="self_attn", learned_positions="embed_positions",
)  # fmt: skip
_BLOOM = Family(
    name="bloom", base="transformer", checkpoint_prefix="transformer.", layers="h", embedding="word_embeddings",
    first_extras=("word_embeddings_layernorm",), norm="ln_f", attention="self_attention", uses_alibi=True,
)  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (_GPT2, _OPT, _BLOOM, _rotary("llama"), _rotary("mistral"), _rotary("qwen2"), _rotary("qwen3"))
}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError naming the file when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model file {path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"model file {path} is not a JSON object")
    return value


def family_of(folder: Path) -> Family:
    """The family of the model in ``folder``, by its config.json alone. Raises ConfigError for any other model."""
    raw = read_json(folder / "config.json")
    model_type = str(raw.get("model_type", ""))
    if model_type not in FAMILIES:
        architecture = ", ".join(raw.get("architectures") or ["no architecture"])
        raise ConfigError(
            f"model in {folder} is of type {model_type!r} ({architecture}), which is not supported\n"
            f"supported families: {', '.join(sorted(FAMILIES))}"
        )
    if "quantization_config" in raw:
        raise ConfigError(f"model in {folder} is quantized\ngive a float32, bfloat16 or float16 checkpoint")
    return FAMILIES[model_type]


def read_config(folder: Path) -> Any:
    """transformers' config of the model in ``folder``; imports transformers, needs no network."""
    from transformers import AutoConfig

    family_of(folder)
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{folder / 'config.json'} is refused by transformers: {first_line}") from error
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        raise ConfigError(f"model in {folder} uses longrope positions, which depend on the length of the whole batch")
    return config


def window_of(config: Any, layer_index: int) -> int | None:
    """Positions that a layer looks back over, its own included; None without a sliding window."""
    window = getattr(config, "sliding_window", None)
    if window is None or config.model_type not in ("mistral", "qwen2", "qwen3"):
        return None
    layer_types = getattr(config, "layer_types", None)
    if config.model_type != "mistral" and layer_types and layer_types[layer_index] != "sliding_attention":
        return None
    return int(window)


def own_limit(config: Any) -> int | None:
    """The most positions that the model takes; None where it has no limit (alibi)."""
    if FAMILIES[config.model_type].uses_alibi:
        return None
    return int(config.max_position_embeddings)


def embed(family: Family, parts: Mapping[str, Any], token_ids_BT: Any, positions_BT: Any) -> Any:
    """Hidden states [B, T, E] at the entrance of layer 0; ``parts`` maps part names to modules."""
    hidden_BTE = parts[family.embedding](token_ids_BT)
    if (project_in := parts.get("project_in")) is not None:
        hidden_BTE = project_in(hidden_BTE)
    if family.name == "gpt2":
        return hidden_BTE + parts["wpe"](positions_BT)
    if family.name == "opt":
        # The first argument is a mask that positions given outright leave unread; the offset of 2 is inside.
        return hidden_BTE + parts["embed_positions"](None, 0, position_ids=positions_BT)
    if family.name == "bloom":
        return parts["word_embeddings_layernorm"](hidden_BTE)
    return hidden_BTE


def call_layer(
    family: Family, layer: Any, hidden_BTE: Any, *, mask: Any, cache: Any, positions_BT: Any, rotary: Any, alibi: Any
) -> Any:
    """Hidden states [B, T, E] after one layer."""
    if family.uses_alibi:
        return layer(hidden_BTE, alibi=alibi, attention_mask=mask, layer_past=cache, use_cache=True)[0]
    if family.uses_rotary:
        return layer(
            hidden_BTE, attention_mask=mask, cache=cache, position_ids=positions_BT, position_embeddings=rotary
        )
    if family.name == "opt":
        return layer(hidden_BTE, attention_mask=mask, cache=cache, position_ids=positions_BT)
    return layer(hidden_BTE, attention_mask=mask, cache=cache)
