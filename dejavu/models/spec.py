"""What a worker needs to know of a model: a small frozen value that travels through the store as JSON."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from dejavu.errors import ConfigError, nearest
from dejavu.kv.layout import DTYPE_BYTES, KvLayout, LayerRange
from dejavu.models.checkpoint import Checkpoint
from dejavu.models.families import FAMILIES, Family, own_limit, read_config, read_json
from dejavu.models.modelled_times import ModelledTimes
from dejavu.models.stage_share import StageShare

DEFAULT_MAX_LENGTH = 2048
_SAMPLE_BYTES = 256
_VOLATILE_CONFIG_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
_BUFFER_SUFFIXES = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a local folder, and how it is run."""

    folder: str
    """Local folder with config.json, safetensors (whole or sharded) and perhaps a tokenizer; empty in a rehearsal of a
    model of which only the sizes are known."""
    family: str
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``: the dtype of computation and of the KV cache."""
    max_length: int
    """Positions of a row: prompt and new tokens together."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    model_hash: str
    layer_parameters: int
    """Of one layer (the largest, where they differ)."""
    embedding_parameters: int
    """Of what the first stage owns beside its layers."""
    head_parameters: int
    """Of what the last stage owns beside its layers; a tied head counts, since a last stage holds a copy of it."""
    modelled: ModelledTimes | None = None
    """Of a rehearsal: nothing is computed, and heads and hidden size are smaller than the model's own."""

    @property
    def kv_scale(self) -> float:
        """Bytes of KV here, over bytes of the model's KV: below 1 in a rehearsal."""
        return 1.0 if self.modelled is None else self.modelled.kv_scale

    @property
    def layout(self) -> KvLayout:
        """What the model's KV cache is made of."""
        return KvLayout(
            model_hash=self.model_hash,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            max_length=self.max_length,
        )

    def weight_bytes(self, layers: LayerRange, first: bool, last: bool) -> int:
        """Bytes of weights that a stage with these layers holds."""
        parameters = len(layers) * self.layer_parameters
        parameters += self.embedding_parameters if first else 0
        parameters += self.head_parameters if last else 0
        return parameters * DTYPE_BYTES[self.dtype]

    def share(self, layers: LayerRange) -> StageShare:
        """What a stage with these layers has of the model's work."""
        of_layers = len(layers) / self.num_layers
        head = self.head_parameters if layers.stop == self.num_layers else 0
        whole = self.num_layers * self.layer_parameters + self.head_parameters
        own = len(layers) * self.layer_parameters + head
        return StageShare(layers=of_layers, weights=own / whole if whole else of_layers)


def describe(folder: Path, dtype: str | None = None, max_length: int | None = None) -> ModelSpec:
    """The spec of the model in ``folder``; reads its config and the headers of its weights.

    ``dtype`` None takes the checkpoint's own; ``max_length`` None takes the model's own limit, at most 2048.
    Imports transformers. Raises ConfigError where folder, family, dtype or length do not fit.
    """
    config = read_config(folder)
    family = FAMILIES[config.model_type]
    checkpoint = Checkpoint(folder)
    num_layers = int(config.num_hidden_layers)
    layer_parameters, embedding_parameters, head_parameters = _count_parameters(family, checkpoint, num_layers)
    num_heads = int(config.num_attention_heads)
    return ModelSpec(
        folder=str(folder.resolve()),
        family=family.name,
        dtype=_choose_dtype(folder, dtype),
        max_length=_choose_length(folder, max_length, own_limit(config)),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // num_heads),
        hidden_size=int(config.hidden_size),
        vocab_size=int(config.vocab_size),
        eos_token_ids=_eos_token_ids(folder, config),
        model_hash=_hash(checkpoint),
        layer_parameters=layer_parameters,
        embedding_parameters=embedding_parameters,
        head_parameters=head_parameters,
    )


def _choose_dtype(folder: Path, dtype: str | None) -> str:
    if dtype is None:
        raw = read_json(folder / "config.json")
        own = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
        return own if own in DTYPE_BYTES else "float32"
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"model.dtype: {dtype!r} is not supported\n{nearest(dtype, DTYPE_BYTES)}")
    return dtype


def _choose_length(folder: Path, max_length: int | None, limit: int | None) -> int:
    if max_length is None:
        return min(limit or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH)
    if max_length < 2:
        raise ConfigError(f"model.max_length: {max_length} leaves no room for a prompt and a token; the least is 2")
    if limit is not None and max_length > limit:
        raise ConfigError(f"model.max_length: {max_length} is more than the {limit} positions of the model in {folder}")
    return max_length


def _eos_token_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """The tokens that end a sequence: what generation_config.json says, else config.json."""
    generation = folder / "generation_config.json"
    value = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if value is None:
        value = getattr(config, "eos_token_id", None)
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(token) for token in value)


def _count_parameters(family: Family, checkpoint: Checkpoint, num_layers: int) -> tuple[int, int, int]:
    """Parameters of a layer, of the first stage's parts and of the last stage's parts."""
    sizes = {
        _full_name(family, name): info.num_elements
        for name, info in checkpoint.tensors.items()
        if not name.endswith(_BUFFER_SUFFIXES)
    }

    def under(prefix: str) -> int:
        return sum(size for name, size in sizes.items() if name.startswith(prefix))

    of_layers = [under(family.layer_tensor_prefix(layer)) for layer in range(num_layers)]
    if 0 in of_layers or family.embedding_weight not in sizes:
        what = f"layer {of_layers.index(0)}" if 0 in of_layers else f"the embedding {family.embedding_weight}"
        raise ConfigError(
            f"model in {checkpoint.folder}: config.json says {family.name} with {num_layers} layers, "
            f"but the weights hold nothing of {what}"
        )
    first = sum(under(f"{family.base}.{part}.") for part in (family.embedding, *family.first_extras))
    last = sum(under(f"{family.base}.{part}.") for part in (family.norm, *family.last_extras))
    return max(of_layers), first, last + sizes.get("lm_head.weight", sizes[family.embedding_weight])


def _full_name(family: Family, name: str) -> str:
    if name.startswith((family.checkpoint_prefix, "lm_head.")):
        return name
    return family.checkpoint_prefix + name


def _hash(checkpoint: Checkpoint) -> str:
    """Digest of config, file sizes, and each tensor's name, shape, dtype and a sample of its bytes.

    Not of every byte: a start must not read the whole model. Equal on every machine that has the same files.
    """
    digest = hashlib.blake2b(digest_size=16)
    raw = read_json(checkpoint.folder / "config.json")
    stable = {key: value for key, value in raw.items() if key not in _VOLATILE_CONFIG_KEYS}
    digest.update(json.dumps(stable, sort_keys=True).encode())
    for name in checkpoint.files:
        path = checkpoint.folder / name
        digest.update(f"{name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            for tensor, info in sorted(checkpoint.tensors.items()):
                if info.file != name:
                    continue
                digest.update(f"{tensor} {info.dtype} {info.shape}\n".encode())
                sample_bytes = min(_SAMPLE_BYTES, info.num_bytes)
                file.seek(info.start + (info.num_bytes - sample_bytes) // 2)
                digest.update(file.read(sample_bytes))
    return digest.hexdigest()
