"""What a workload needs of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypedDict


class Message(TypedDict):
    """One turn of a chat, as chat templates take it."""

    role: Literal["system", "user", "assistant"]
    content: str


class Codec(Protocol):
    """Text to token ids."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a bare text."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat, up to where the assistant answers."""
