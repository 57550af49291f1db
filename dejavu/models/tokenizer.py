"""Text to tokens and back, chat templates, and text that grows token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dejavu.errors import ConfigError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextCodec:
    """The tokenizer of a model folder. Needs no network."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.folder = folder
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, TypeError, ImportError) as error:
            first_line = str(error).strip().splitlines()[0][:200]
            raise ConfigError(f"model folder {folder} has no tokenizer that can be read: {first_line}") from error

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows, special ones included."""
        return len(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        """True when messages can be encoded."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with what the model wants before it (such as BOS)."""
        tokens: list[int] = self._tokenizer(text)["input_ids"]
        return tokens

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """The tokens of ``{role, content}`` messages up to where the assistant's answer begins.

        Raises ConfigError when the model has no chat template, or when its template refuses the messages.
        """
        from jinja2.exceptions import TemplateError

        if not self.has_chat_template:
            raise ConfigError(f"model folder {self.folder} has no chat template; give prompt instead of messages")
        conversation = [dict(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ConfigError(f"the chat template of {self.folder} refuses the messages: {error}") from error
        # The template has written the special tokens itself.
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def most_characters(self, num_tokens: int) -> int:
        """A text with more characters than this has more than so many tokens: none is longer than the longest."""
        return num_tokens * self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))

    def token_text(self, token: int) -> str:
        """The text of one token by itself, a special one by its name; bytes that make no character are replaced."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


class IncrementalDecoder:
    """Turns one row's tokens into text as they come; a character whose bytes are not all there is held back."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        self._context_index = 0
        self._done_index = 0
        self.text = ""
        """Everything given out so far."""

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._tokens.append(token)
        text = self._pending()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        return self._give(text)

    def finish(self) -> str:
        """What was held back, with replacement characters for bytes that never came."""
        return self._give(self._pending())

    def _pending(self) -> str:
        """Text of the tokens not given out yet, decoded with those before them: a token's text may depend on them."""
        known = self._codec.decode(self._tokens[self._context_index : self._done_index])
        return self._codec.decode(self._tokens[self._context_index :])[len(known) :]

    def _give(self, text: str) -> str:
        self._context_index = self._done_index
        self._done_index = len(self._tokens)
        self.text += text
        return text
