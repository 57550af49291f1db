"""A JSON-lines file of prompts: its syntax, checked line by line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from dejavu.errors import ConfigError, nearest

NumTokens = Annotated[int, msgspec.Meta(ge=1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_UNKNOWN_FIELD = re.compile(r"contains unknown field `(.*?)`")


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class PromptLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request as the user writes it: exactly one of ``prompt``, ``messages`` and ``prompt_tokens``."""

    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    prompt_tokens: tuple[TokenId, ...] | None = None
    max_tokens: NumTokens | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    seed: Seed | None = None
    stop: str | tuple[str, ...] = ()
    ignore_eos: bool | None = None
    id: str | int | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, without empty strings, which would end every answer at once."""
        strings = (self.stop,) if isinstance(self.stop, str) else self.stop
        return tuple(text for text in strings if text)


class NumberedLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line and where it stands."""

    number: int
    """From 1."""
    line: PromptLine

    @property
    def request_id(self) -> str:
        """The user's id, or one made of the line's number."""
        return f"line-{self.number}" if self.line.id is None else str(self.line.id)


def numbered_texts(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file that are not blank, numbered from 1.

    Raises:
        ConfigError: naming path and line where the text is not UTF-8.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path}:{number}: is not UTF-8 text (byte {error.start + 1} of the line)") from error
            if text:
                yield number, text


def read_lines(path: Path, most: int | None) -> list[NumberedLine]:
    """The first ``most`` requests of the file.

    Raises:
        ConfigError: naming path and line of the first one that is malformed, or whose id an earlier one has; or the
            path of a file that holds no request.
    """
    decoder = msgspec.json.Decoder(PromptLine)
    lines: list[NumberedLine] = []
    seen: dict[str, int] = {}
    for number, text in numbered_texts(path):
        if most is not None and len(lines) >= most:
            break
        numbered = NumberedLine(number=number, line=_decode(decoder, path, number, text))
        earlier = seen.setdefault(numbered.request_id, number)
        if earlier != number:
            raise ConfigError(f"{path}:{number}: id {numbered.request_id!r} is also that of line {earlier}")
        lines.append(numbered)
    if not lines:
        raise ConfigError(f"{path}: holds no request")
    return lines


def _decode(decoder: msgspec.json.Decoder[PromptLine], path: Path, number: int, text: str) -> PromptLine:
    try:
        line = decoder.decode(text)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}:{number}: {_explanation(str(error))}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}:{number}: is not a JSON object ({error})") from error
    given = [name for name in ("prompt", "messages", "prompt_tokens") if getattr(line, name) is not None]
    if len(given) != 1:
        found = f"has {' and '.join(given)}" if given else "has none"
        raise ConfigError(f"{path}:{number}: {found}; a request has exactly one of prompt, messages, prompt_tokens")
    return line


def _explanation(message: str) -> str:
    """msgspec's message, with the nearest valid names after an unknown field."""
    unknown = _UNKNOWN_FIELD.search(message)
    if unknown is None:
        return message
    owner = ChatMessage if "messages" in message else PromptLine
    return f"unknown field {unknown.group(1)!r}\n{nearest(unknown.group(1), owner.__struct_fields__)}"
