"""Models in the shape of published ones of about 125 million parameters, with random weights, for measurements.

Computing and moving KV cost the same whatever the weights are, and nothing has to be fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejavu.models.made_folder import Progress, make_folder_once
from dejavu.models.random_weights import EOS_TOKEN_ID, save_byte_tokenizer, save_random_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a published model, in the words of transformers' config class for its family."""

    config_class: str
    num_layers: int
    sizes: Mapping[str, int]


SHAPES: Mapping[str, Shape] = {
    # OPT: Open Pre-trained Transformer Language Models (Zhang et al. 2022), table 1.
    "random-opt-125m": Shape(
        config_class="OPTConfig",
        num_layers=12,
        sizes={
            "num_hidden_layers": 12,
            "hidden_size": 768,
            "word_embed_proj_dim": 768,
            "num_attention_heads": 12,
            "ffn_dim": 3072,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
        },
    ),
    # GPT-2's smallest; its limit of 1024 positions is its own.
    "random-gpt2-124m": Shape(
        config_class="GPT2Config",
        num_layers=12,
        sizes={"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
    ),
}


def make_random(kind: str, cache: Path, *, seed: int, progress: Progress) -> Path:
    """The folder of the model under ``cache``, 250 MB: equal kind and seed, equal bytes. Made once and atomically.

    Weights are stored as bfloat16, half of what float32 takes: random numbers lose nothing by it, and they are
    computed with in whatever dtype a run declares. The tokenizer is one of bytes; token ids beyond it have no text.
    """
    shape = SHAPES[kind]

    def make(half_made: Path) -> None:
        save_random_model(_config(shape), half_made, seed=seed, stored="bfloat16", progress=progress)
        save_byte_tokenizer(half_made)

    return make_folder_once(cache / f"{kind}-s{seed}", make)


def _config(shape: Shape) -> Any:
    import transformers

    return getattr(transformers, shape.config_class)(
        **shape.sizes,
        bos_token_id=EOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=EOS_TOKEN_ID,
    )
