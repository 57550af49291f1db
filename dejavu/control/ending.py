"""When a row ends. One rule, used by the controller and by token stage 0, so that they always agree."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What ends a row by itself. Stop strings are the controller's: they need text."""

    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    """Empty when the request ignores EOS."""


def ending(token: int, num_generated: int, limits: Limits) -> FinishReason | None:
    """Why the row ends with ``token`` as its ``num_generated``-th new token (1 for the first), or None."""
    if token in limits.eos_token_ids:
        return "stop"
    if num_generated >= limits.max_tokens:
        return "length"
    return None
