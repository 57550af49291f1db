"""What clients get: whole answers and the chunks of a stream, in the API's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec

from dejavu.api.following import Piece
from dejavu.api.logprobs import ChatLogprobs, CompletionLogprobs, chat_logprobs, completion_logprobs
from dejavu.models.tokenizer import TextCodec
from dejavu.request import Completion


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of prompt and answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, line: Completion) -> Usage:
        """Of a request that has ended; a token that ended it counts."""
        num_prompt, num_new = line.prompt_tokens, len(line.tokens)
        return cls(prompt_tokens=num_prompt, completion_tokens=num_new, total_tokens=num_prompt + num_new)


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The only choice, or what a chunk adds to it."""

    index: int = 0
    text: str = ""
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class ChatText(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer's message, or what a chunk adds to it."""

    role: str | None = None
    content: str | None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The only choice of a whole answer."""

    index: int = 0
    message: ChatText
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to the only choice."""

    index: int = 0
    delta: ChatText
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


Choices: TypeAlias = Sequence[CompletionChoice | ChatChoice | ChatChunkChoice]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer or a chunk; ``usage`` is left out of the chunks of a stream that was not asked for it."""

    id: str
    object: str
    created: int
    model: str
    choices: Choices
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Shape(Protocol):
    """How one way of asking words its answers."""

    def whole(self, line: Completion, pieces: Sequence[Piece]) -> Sequence[CompletionChoice | ChatChoice]:
        """The choices of an answer that is complete."""

    def opening(self) -> Sequence[ChatChunkChoice]:
        """The choices of a chunk before the first text; none: no such chunk."""

    def chunk(
        self, text: str, pieces: Sequence[Piece], finish_reason: str | None
    ) -> Sequence[CompletionChoice | ChatChunkChoice]:
        """The choices of a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape:
    """Of ``/v1/completions``."""

    codec: TextCodec | None
    has_logprobs: bool

    def whole(self, line: Completion, pieces: Sequence[Piece]) -> Sequence[CompletionChoice]:
        """See ``Shape``."""
        return [CompletionChoice(text=line.text, logprobs=self._logprobs(pieces), finish_reason=line.finish_reason)]

    def opening(self) -> Sequence[ChatChunkChoice]:
        """See ``Shape``."""
        return ()

    def chunk(self, text: str, pieces: Sequence[Piece], finish_reason: str | None) -> Sequence[CompletionChoice]:
        """See ``Shape``."""
        return [CompletionChoice(text=text, logprobs=self._logprobs(pieces), finish_reason=finish_reason)]

    def _logprobs(self, pieces: Sequence[Piece]) -> CompletionLogprobs | None:
        return completion_logprobs(pieces, self.codec) if self.has_logprobs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """Of ``/v1/chat/completions``."""

    codec: TextCodec | None
    has_logprobs: bool

    def whole(self, line: Completion, pieces: Sequence[Piece]) -> Sequence[ChatChoice]:
        """See ``Shape``."""
        message = ChatText(role="assistant", content=line.text)
        return [ChatChoice(message=message, logprobs=self._logprobs(pieces), finish_reason=line.finish_reason)]

    def opening(self) -> Sequence[ChatChunkChoice]:
        """See ``Shape``."""
        return [ChatChunkChoice(delta=ChatText(role="assistant", content=""))]

    def chunk(self, text: str, pieces: Sequence[Piece], finish_reason: str | None) -> Sequence[ChatChunkChoice]:
        """See ``Shape``."""
        delta = ChatText(content=text) if text else ChatText()
        return [ChatChunkChoice(delta=delta, logprobs=self._logprobs(pieces), finish_reason=finish_reason)]

    def _logprobs(self, pieces: Sequence[Piece]) -> ChatLogprobs | None:
        return chat_logprobs(pieces, self.codec) if self.has_logprobs else None
