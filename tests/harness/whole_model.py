"""What the whole model says in one process: the texts that a service's answers are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dejavu.models.random_weights import EOS_TOKEN_ID
from dejavu.models.reference import generate_batch, load_reference
from dejavu.models.tokenizer import TextCodec


class Right:
    """What the whole model says."""

    def __init__(self, folder: Path) -> None:
        self.codec = TextCodec(folder)
        self._model = load_reference(folder)

    def text(self, prompt: str, max_tokens: int) -> str:
        return self._text(self.codec.encode(prompt), max_tokens)

    def chat(self, *messages: Any, max_tokens: int) -> str:
        bare = [{"role": message["role"], "content": message["content"]} for message in messages]
        return self._text(self.codec.encode_chat(bare), max_tokens)

    def ends_at_once(self) -> str:
        """A prompt whose first token is EOS."""
        prompts = [str(number) for number in range(1000, 4000)]
        firsts = generate_batch(self._model, [self.codec.encode(prompt) for prompt in prompts], 1)
        return next(prompt for prompt, tokens in zip(prompts, firsts, strict=True) if tokens == [EOS_TOKEN_ID])

    def _text(self, prompt: list[int], max_tokens: int) -> str:
        return self.codec.decode(generate_batch(self._model, [prompt], max_tokens, ignore_eos=True)[0])
