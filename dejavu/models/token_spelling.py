"""How a tokenizer spells its tokens, and the bytes that each adds to a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What sentencepiece writes for a space."""
_BYTE = re.compile("<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """Of one tokenizer.

    Args:
        kinds: of the steps that make text out of its tokens (``ByteLevel``, ``Metaspace``, ``Replace``, ...).
        added: texts of the tokens that are not of its model's vocabulary, such as the special ones.
    """

    kinds: frozenset[str] = frozenset()
    added: Mapping[int, str] = field(default_factory=dict)

    def bytes_of(self, token: int, spelled: str | None) -> bytes | None:
        """UTF-8 of a token, perhaps of a part of a character; None where that does not follow from its spelling."""
        if token in self.added:
            return self.added[token].encode()
        if not spelled:
            return None
        if "ByteLevel" in self.kinds:
            known = _byte_of_letter()
            return bytes(known[letter] for letter in spelled) if known.keys() >= set(spelled) else None
        if "ByteFallback" in self.kinds and (written := _BYTE.fullmatch(spelled)):
            return bytes([int(written.group(1), 16)])
        if self.kinds & {"Metaspace", "ByteFallback"}:
            return spelled.replace(_SPACE, " ").encode()
        return None


def spelling_of(tokenizer: Any) -> Spelling:
    """Of a tokenizer of ``transformers``; one without a Rust backend tells nothing of its spelling."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return Spelling()
    added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    return Spelling(kinds=frozenset(_kinds(decoder)), added=added)


def _kinds(step: Any) -> Iterator[str]:
    """Of a step as the library describes it, and of those that it consists of."""
    if step is not None:
        yield str(step["type"])
        for one in step.get("decoders", ()):
            yield from _kinds(one)


@cache
def _byte_of_letter() -> Mapping[str, int]:
    """GPT-2's letters for bytes: those that can be seen are themselves, the others follow after 255."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(unseen)}
