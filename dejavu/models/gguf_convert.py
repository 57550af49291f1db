"""A GGUF file of a Llama becomes a folder that transformers and our stages load: weights, config, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dejavu.errors import ConfigError
from dejavu.models.made_folder import Progress

_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN_TYPE = 3
_PRE_TOKENIZERS = ("smollm", "default", "gpt-2")
_IGNORED_TENSORS = ("rope_freqs.weight",)


def convert_gguf(source: Path, folder: Path, progress: Progress) -> None:
    """``folder`` holds float32 safetensors, config.json, generation_config.json and a tokenizer of the GGUF ``source``.

    Raises ConfigError for another architecture than llama or a tokenizer that is not known here.
    """
    from gguf import GGUFReader

    reader = GGUFReader(str(source))
    if (architecture := _field(reader, "general.architecture")) != "llama":
        raise ConfigError(f"{source.name} is of architecture {architecture!r}; only 'llama' is converted")
    config = _config(reader)
    _save_weights(reader, config, folder, progress)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=1))
    save_tokenizer(reader, folder)


def _field(reader: Any, name: str, default: Any = None) -> Any:
    field = reader.get_field(name)
    return default if field is None else field.contents()


def _config(reader: Any) -> dict[str, Any]:
    """transformers' Llama config out of the GGUF's metadata."""
    num_heads = int(_field(reader, "llama.attention.head_count"))
    hidden_size = int(_field(reader, "llama.embedding_length"))
    names = {tensor.name for tensor in reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": int(_field(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(_field(reader, "llama.block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(_field(reader, "llama.attention.head_count_kv", num_heads)),
        "head_dim": int(_field(reader, "llama.rope.dimension_count", hidden_size // num_heads)),
        "max_position_embeddings": int(_field(reader, "llama.context_length")),
        # GGUF keeps these as float32; six digits give back the number that was meant (1e-05).
        "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(f"{_field(reader, 'llama.rope.freq_base', 10000.0):.6g}"),
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "hidden_act": "silu",
        "dtype": "float32",
    }


def _save_weights(reader: Any, config: dict[str, Any], folder: Path, progress: Progress) -> None:
    from gguf import dequantize
    from safetensors.numpy import save_file

    weights: dict[str, npt.NDArray[np.float32]] = {}
    for index, tensor in enumerate(reader.tensors):
        if tensor.name not in _IGNORED_TENSORS:
            values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            weights[_tensor_name(tensor.name)] = _unpermute(tensor.name, values, config)
        progress("converting the weights", index + 1, len(reader.tensors), "items")
    target = folder / "model.safetensors"
    save_file(weights, str(target), metadata={"format": "pt"})
    # The library writes for its user alone; a cache may be shared.
    target.chmod(0o644)


def _tensor_name(name: str) -> str:
    """transformers' name of a GGUF tensor. Raises ConfigError for one that a Llama does not have."""
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in whole:
        return whole[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _TENSOR_NAMES:
        return f"model.layers.{parts[1]}.{_TENSOR_NAMES[parts[2]]}.{parts[3]}"
    raise ConfigError(f"the GGUF file holds a tensor {name!r} that no Llama has")


def _unpermute(name: str, weight: npt.NDArray[np.float32], config: dict[str, Any]) -> npt.NDArray[np.float32]:
    """Rows of q and k in transformers' rotary order; GGUF interleaves the two halves of each head."""
    if ".attn_q." in name:
        num_heads = config["num_attention_heads"]
    elif ".attn_k." in name:
        num_heads = config["num_key_value_heads"]
    else:
        return weight
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def save_tokenizer(reader: Any, folder: Path) -> None:
    """``folder`` holds the GGUF's byte-level BPE as a fast tokenizer, with its special tokens and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model, pre = _field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ConfigError(f"the GGUF file's tokenizer ({model}, {pre}) is not known; known: gpt2 with smollm or gpt-2")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN_TYPE]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    named = {
        f"{role}_token": tokens[index]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (index := _field(reader, f"tokenizer.ggml.{key}_token_id")) is not None
    }
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named)
    wrapped.chat_template = _field(reader, "tokenizer.chat_template")
    wrapped.save_pretrained(str(folder))
