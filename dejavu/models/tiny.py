"""Random tiny models of every family, made on the spot: for tests, and for trying a cluster without a download."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dejavu.models.made_folder import make_folder_once
from dejavu.models.random_weights import BYTE_TOKENS, EOS_TOKEN_ID, save_byte_tokenizer, save_random_model

HIDDEN_SIZE = 64
CONTEXT = 128
VOCAB_SIZE = BYTE_TOKENS
_CONFIG_CLASSES: Mapping[str, str] = {
    "gpt2": "GPT2Config",
    "opt": "OPTConfig",
    "bloom": "BloomConfig",
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
}


def make_tiny(
    family: str,
    folder: Path,
    *,
    num_layers: int = 4,
    seed: int = 0,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    sliding_window: int | None = None,
    tied: bool = True,
    context: int = CONTEXT,
) -> Path:
    """A folder under ``folder`` with config, weights and tokenizer of a random model; equal parameters, equal bytes.

    Made once and atomically; later calls find it. ``num_kv_heads`` counts for the rotary families alone.
    """
    parts = [f"tiny-{family}", f"l{num_layers}", f"h{num_heads}-{num_kv_heads or num_heads}", f"c{context}", f"s{seed}"]
    parts += [f"w{sliding_window}"] if sliding_window else []
    parts += [] if tied else ["untied"]

    def make(half_made: Path) -> None:
        config = _config(family, num_layers, num_heads, num_kv_heads or num_heads, sliding_window, context, tied)
        save_random_model(config, half_made, seed=seed)
        save_byte_tokenizer(half_made)

    return make_folder_once(folder / "-".join(parts), make)


def _config(
    family: str,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    sliding_window: int | None,
    context: int,
    tied: bool,
) -> Any:
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": tied,
        "bos_token_id": EOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": EOS_TOKEN_ID,
    }
    heads = {"num_hidden_layers": num_layers, "num_attention_heads": num_heads, "hidden_size": HIDDEN_SIZE}
    match family:
        case "gpt2":
            sizes = {"n_layer": num_layers, "n_head": num_heads, "n_embd": HIDDEN_SIZE, "n_positions": context}
        case "bloom":
            sizes = {"n_layer": num_layers, "n_head": num_heads, "hidden_size": HIDDEN_SIZE}
        case "opt":
            sizes = {
                **heads,
                "ffn_dim": 4 * HIDDEN_SIZE,
                "max_position_embeddings": context,
                "word_embed_proj_dim": HIDDEN_SIZE,
            }
        case _:
            sizes = {
                **heads,
                "intermediate_size": 3 * HIDDEN_SIZE,
                "max_position_embeddings": context,
                "num_key_value_heads": num_kv_heads,
                "head_dim": HIDDEN_SIZE // num_heads,
                **_window(family, sliding_window, num_layers),
            }
    return getattr(transformers, _CONFIG_CLASSES[family])(**common, **sizes)


def _window(family: str, sliding_window: int | None, num_layers: int) -> dict[str, Any]:
    if family == "mistral":
        return {"sliding_window": sliding_window}
    if family in ("qwen2", "qwen3") and sliding_window:
        return {"use_sliding_window": True, "sliding_window": sliding_window, "max_window_layers": num_layers // 2}
    return {}
