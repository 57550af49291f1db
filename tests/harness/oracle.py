"""What one process gives: transformers' whole model beside the spec and tokenizer of the same folder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from dejavu.ids import RequestId
from dejavu.models.reference import generate_batch, load_reference
from dejavu.models.sampling import sample
from dejavu.models.spec import ModelSpec, describe
from dejavu.models.tiny import make_tiny
from dejavu.models.tokenizer import TextCodec
from dejavu.request import Request

NUM_BYTE_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """A tiny model, and what is right for it."""

    spec: ModelSpec
    codec: TextCodec
    reference: Any

    @classmethod
    def of(cls, family: str, folder: Path, *, num_layers: int = 5, num_kv_heads: int | None = 2) -> Oracle:
        """The oracle of a random model of the family, made under ``folder``."""
        made = make_tiny(family, folder, num_layers=num_layers, num_kv_heads=num_kv_heads)
        return cls(spec=describe(made), codec=TextCodec(made), reference=load_reference(made))

    def spec_ending_at(self, *tokens: int) -> ModelSpec:
        """The same model with these tokens as EOS."""
        return msgspec.structs.replace(self.spec, eos_token_ids=tokens)

    def tokens(self, request: Request) -> tuple[int, ...]:
        """The request's tokens; greedy ones are those of transformers' own ``generate``."""
        if not request.sampling.is_greedy:
            return self._drawn(request)
        prompt = list(request.prompt_tokens)
        return tuple(generate_batch(self.reference, [prompt], request.max_tokens, ignore_eos=request.ignore_eos)[0])

    def all_tokens(self, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
        """Tokens by request."""
        return {request.id: self.tokens(request) for request in requests}

    def cells(self, tokens: Sequence[int]) -> torch.Tensor:
        """The cache after ``tokens``: [layer, (K, V), head, position, dim]."""
        with torch.inference_mode():
            cache = self.reference(torch.tensor([list(tokens)]), use_cache=True).past_key_values
        return torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])

    def _drawn(self, request: Request) -> tuple[int, ...]:
        ids = list(request.prompt_tokens)
        while len(ids) < len(request.prompt_tokens) + request.max_tokens:
            with torch.inference_mode():
                logits_BV = self.reference(torch.tensor([ids])).logits[:, -1]
            ids += sample(logits_BV, [request.sampling], [len(ids)])
            if ids[-1] in self.spec.eos_token_ids and not request.ignore_eos:
                break
        return tuple(ids[len(request.prompt_tokens) :])


def ragged_requests(num_requests: int, *, seed: int = 0, longest: int = 20, max_tokens: int = 9) -> list[Request]:
    """Random prompts of unequal lengths with unequal limits, so that rows end at different steps."""
    chooser = random.Random(seed)
    return [
        Request(
            id=RequestId(f"r{index}"),
            prompt_tokens=random_prompt(chooser, chooser.randint(1, longest)),
            max_tokens=chooser.randint(1, max_tokens),
        )
        for index in range(num_requests)
    ]


def random_prompt(chooser: random.Random, length: int) -> tuple[int, ...]:
    """Byte tokens, no special ones."""
    return tuple(chooser.randrange(NUM_BYTE_TOKENS) for _ in range(length))
