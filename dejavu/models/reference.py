"""What transformers itself generates in one process: the oracle of the tests and the yardstick of the tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def load_reference(folder: Path, dtype: str = "float32") -> Any:
    """transformers' whole model of ``folder`` in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=getattr(torch, dtype), local_files_only=True)
    return model.eval()


def generate_reference(
    folder: Path,
    dtype: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    ignore_eos: bool = False,
    batched: bool = False,
) -> list[list[int]]:
    """The greedy tokens of each prompt, EOS included where one ends it. One prompt at a time unless ``batched``."""
    model = load_reference(folder, dtype)
    if batched:
        return generate_batch(model, prompts, max_tokens, ignore_eos=ignore_eos)
    return [generate_batch(model, [prompt], max_tokens, ignore_eos=ignore_eos)[0] for prompt in prompts]


def generate_batch(
    model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, *, ignore_eos: bool = False
) -> list[list[int]]:
    """The greedy tokens of each prompt out of one left-padded batch."""
    import torch
    from transformers import GenerationConfig

    eos = _eos(model)
    # Whatever the folder asks of a chat (sampling, penalties) has no place in an oracle.
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None if ignore_eos else eos or None)
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max_tokens)
    model.generation_config.eos_token_id = eos or None
    rows = out[:, longest:].tolist()
    return [row if ignore_eos else _until_eos(row, eos) for row in rows]


def _eos(model: Any) -> list[int]:
    value = model.generation_config.eos_token_id
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _until_eos(row: list[int], eos: Sequence[int]) -> list[int]:
    ends = [index for index, token in enumerate(row) if token in eos]
    return row[: ends[0] + 1] if ends else row
