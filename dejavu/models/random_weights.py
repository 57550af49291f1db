"""A model folder of random weights in any shape that transformers can describe, with a tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dejavu.models.made_folder import Progress

EOS = "<|endoftext|>"
EOS_TOKEN_ID = 256
_SPECIAL_TOKENS = (EOS, "<|user|>", "<|assistant|>", "<|system|>")
BYTE_TOKENS = 256 + len(_SPECIAL_TOKENS)
"""What the tokenizer knows: one token a byte, and the special ones."""
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_LAYER_SCALE: Mapping[str, float] = {"gpt2": 2.5, "opt": 2.5, "bloom": 8.0}
"""Their layers must outweigh the embedding, or a tied head repeats the last token."""


def save_random_model(
    config: Any,
    folder: Path,
    *,
    seed: int,
    stored: Literal["float32", "bfloat16"] = "float32",
    progress: Progress | None = None,
) -> None:
    """``folder`` holds config and weights of a model of that transformers config; equal arguments, equal bytes.

    Args:
        stored: number format of the file.
        progress: told of the bytes made.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, GenerationConfig

    dtype = getattr(torch, stored)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    # Tied parameters appear once, under the embedding's name, as checkpoints have them.
    parameters = dict(sorted(model.named_parameters()))
    total, done = sum(parameter.nbytes for parameter in parameters.values()), 0
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        tensors[name] = _random(name, parameter.shape, generator, config).to(dtype)
        done += parameter.nbytes
        if progress is not None:
            progress("making random weights", done, total, "bytes")
    target = folder / "model.safetensors"
    save_file(tensors, str(target), metadata={"format": "pt"})
    target.chmod(0o644)
    config.architectures = [type(model).__name__]
    config.dtype = stored
    config.save_pretrained(str(folder))
    GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id).save_pretrained(str(folder))


def _random(name: str, shape: Sequence[int], generator: Any, config: Any) -> Any:
    """Values large enough that greedy outputs vary with the prompt instead of settling on one token."""
    import torch

    noise = torch.randn(*shape, generator=generator)
    if len(shape) == 1:
        return 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)
    if "embed" in name or "wte" in name or "wpe" in name or "lm_head" in name:
        return 0.5 * noise
    return noise * _LAYER_SCALE.get(config.model_type, 1.5) / config.hidden_size**0.5


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
