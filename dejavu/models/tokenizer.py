"""Text to tokens and back, chat templates, and text that grows token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dejavu.errors import ConfigError
from dejavu.models.token_spelling import Spelling, spelling_of

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_BYTES = 4
"""Of a character in UTF-8."""


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
        return self.encode_chat_text(self.chat_text(messages))

    def encode_chat_text(self, text: str) -> list[int]:
        """The tokens of what ``chat_text`` has written, special tokens included."""
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def chat_text(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The messages in the model's template, up to where the assistant's answer begins.

        Raises ConfigError when the model has no chat template, or when its template refuses the messages.
        """
        from jinja2.exceptions import TemplateError

        if not self.has_chat_template:
            raise ConfigError(f"model folder {self.folder} has no chat template; give prompt instead of messages")
        conversation = [dict(message) for message in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ConfigError(f"the chat template of {self.folder} refuses the messages: {error}") from error
        return text

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
        """The text of one token by itself, a special one by its name; ``bytes:\\xe4\\xb8`` where it is no text."""
        known = self.token_bytes(token)
        if known is None:
            return self._decoded(token)
        try:
            return known.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known)

    def token_bytes(self, token: int) -> bytes | None:
        """What the token adds to a text, in UTF-8, perhaps a part of a character; None: the tokenizer does not tell."""
        known = self._spelling.bytes_of(token, self._tokenizer.convert_ids_to_tokens(token))
        if known is not None:
            return known
        text = self._decoded(token)
        return None if _REPLACEMENT in text else text.encode()

    @cached_property
    def _spelling(self) -> Spelling:
        return spelling_of(self._tokenizer)

    def _decoded(self, token: int) -> str:
        text: str = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


class IncrementalDecoder:
    """Turns one row's tokens into text as they come; a character whose bytes are not all there is held back.

    What a token costs does not grow with their number.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        """Those not given out yet, after those before them: a token's text may depend on these."""
        self._num_context = 0
        self._decoded = ""
        self._num_given = 0
        """Characters of ``_decoded``."""
        self._num_open = 0
        """Tokens since the text last ended with a whole character."""
        self.text = ""
        """Everything given out so far."""

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        text = self._codec.decode([*self._tokens, token])
        if self._tokens and text == self._decoded and self._is_textless(token):
            # A special one, on which no other token's text depends.
            return ""
        self._tokens.append(token)
        self._decoded = text
        num_doubtful = len(text) - len(text.rstrip(_REPLACEMENT))
        self._num_open = self._num_open + 1 if num_doubtful else 0
        if not num_doubtful:
            return self._give_but(0, num_kept=len(self._tokens) - self._num_context)
        if self._num_open <= _MOST_BYTES:
            return ""
        # No character has so many bytes: these are none, but for the last ones perhaps.
        return self._give_but(min(num_doubtful, _MOST_BYTES - 1), num_kept=_MOST_BYTES)

    def finish(self) -> str:
        """What was held back, with replacement characters for bytes that never came."""
        return self._give(len(self._decoded))

    def _is_textless(self, token: int) -> bool:
        # A character may be incomplete before and behind the token, and look the same.
        return not self._decoded.endswith(_REPLACEMENT) or not self._codec.decode([token])

    def _give(self, end: int) -> str:
        piece = self._decoded[self._num_given : end]
        self._num_given = max(self._num_given, end)
        self.text += piece
        return piece

    def _give_but(self, num_held: int, *, num_kept: int) -> str:
        """All but some characters is given out, and so many of the newest tokens stay."""
        text, self._tokens = self._decoded, self._tokens[-num_kept:]
        kept = self._codec.decode(self._tokens)
        num_held = min(num_held, len(kept))
        piece = self._give(len(text) - num_held)
        self._num_context = 0 if num_held else num_kept
        self._decoded, self._num_given = kept, len(kept) - num_held
        return piece
