"""Reads what an OpenAI-compatible endpoint streams: server-sent events, and what each says of the answer. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from dejavu.errors import DejavuError

_DONE = b"[DONE]"


class Usage(msgspec.Struct, frozen=True):
    """How the endpoint counts an answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Delta(msgspec.Struct, frozen=True):
    """What a chat's chunk adds."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """The one choice of a chunk; ``text`` of a completion, ``delta`` of a chat."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def says_something(self) -> bool:
        """A piece of the answer is in it; a chat's first chunk often names the role alone."""
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)))


class Chunk(msgspec.Struct, frozen=True):
    """One event."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    error: Any = None


class StreamError(DejavuError):
    """The stream is not one, or the endpoint says in it that the answer failed. ``kind`` groups such errors."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class EventSplitter:
    """Cuts bytes as they come into the data of events; a line may come in several parts."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events' lines that are whole now."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


@dataclass(slots=True)
class Answer:
    """An answer as it comes in. Mutated by one reader."""

    chunk_times_s: list[float]
    usage: Usage | None = None
    is_finished: bool = False
    is_done: bool = False

    def take(self, data: bytes, at_s: float) -> None:
        """One event's data came at that time. Raises StreamError."""
        if data == _DONE:
            self.is_done = True
            return
        try:
            chunk = msgspec.json.decode(data, type=Chunk)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StreamError("not a chunk", f"{data[:120].decode(errors='replace')} ({error})") from error
        if chunk.error is not None:
            raise StreamError("error in the stream", message_of(chunk.error))
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            finishes = choice.finish_reason is not None
            # An answer without text, such as one whose tokens are all special, has its first token too.
            if choice.says_something or (finishes and not self.chunk_times_s):
                self.chunk_times_s.append(at_s)
            self.is_finished = self.is_finished or finishes

    def check_whole(self) -> None:
        """Raises StreamError unless the endpoint has said that this was all."""
        if not (self.is_done or self.is_finished):
            raise StreamError("cut short", f"the stream ended after {len(self.chunk_times_s)} pieces of the answer")

    @property
    def output_tokens(self) -> int:
        """As the endpoint counts, or the pieces that came where it does not say."""
        return self.usage.completion_tokens if self.usage is not None else len(self.chunk_times_s)


def message_of(error: object) -> str:
    """What an error object of the API says, in one line."""
    said = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(said).split())[:300]


def message_of_body(body: bytes) -> str:
    """What the body of an error response says: the API's error object, or its text."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return message_of(body[:300].decode(errors="replace"))
    return message_of(decoded.get("error", decoded) if isinstance(decoded, dict) else decoded)
