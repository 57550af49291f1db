"""Random tiny models of every family, made on the spot: for tests, and for trying a cluster without a download."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejavu.models.made_folder import make_folder_once

HIDDEN_SIZE = 64
CONTEXT = 128
EOS = "<|endoftext|>"
_SPECIAL_TOKENS = (EOS, "<|user|>", "<|assistant|>", "<|system|>")
VOCAB_SIZE = 256 + len(_SPECIAL_TOKENS)
"""One token a byte, and the special ones."""
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_CONFIG_CLASSES: Mapping[str, str] = {
    "gpt2": "GPT2Config",
    "opt": "OPTConfig",
    "bloom": "BloomConfig",
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
}
_LAYER_SCALE: Mapping[str, float] = {"gpt2": 2.5, "opt": 2.5, "bloom": 8.0}
"""Their layers must outweigh the embedding, or a tied head repeats the last token."""


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
        _save_model(config, seed, half_made)
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
        "bos_token_id": 256,
        "eos_token_id": 256,
        "pad_token_id": 256,
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


def _save_model(config: Any, seed: int, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    # Tied parameters appear once, under the embedding's name, as checkpoints have them.
    shapes = {name: parameter.shape for name, parameter in sorted(model.named_parameters())}
    tensors = {name: _random(name, shape, generator, config.model_type) for name, shape in shapes.items()}
    target = folder / "model.safetensors"
    save_file(tensors, str(target), metadata={"format": "pt"})
    target.chmod(0o644)
    config.architectures = [type(model).__name__]
    config.dtype = "float32"
    config.save_pretrained(str(folder))
    GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id).save_pretrained(str(folder))


def _random(name: str, shape: Sequence[int], generator: Any, family: str) -> Any:
    """Values large enough that greedy outputs vary with the prompt instead of settling on one token."""
    import torch

    noise = torch.randn(*shape, generator=generator)
    if len(shape) == 1:
        return 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)
    if "embed" in name or "wte" in name or "wpe" in name or "lm_head" in name:
        return 0.5 * noise
    return noise * _LAYER_SCALE.get(family, 1.5) / HIDDEN_SIZE**0.5


def save_byte_tokenizer(folder: Path) -> None:
    """``folder`` holds a tokenizer with one token a byte, a chat template and an EOS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        bos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=list(_SPECIAL_TOKENS[1:]),
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    wrapped.save_pretrained(str(folder))
