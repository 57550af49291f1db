"""Log-probabilities of tokens in the two shapes that the API has for them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dejavu.api.following import Piece
from dejavu.models.tokenizer import TextCodec


class LikelyToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token of a place, and how likely it was."""

    token: str
    logprob: float
    bytes: list[int] | None
    """Of the token in UTF-8, to be joined where a character spans several; None: the tokenizer does not tell."""


class ChosenToken(LikelyToken, frozen=True, kw_only=True):
    """The token that was taken, and the likeliest ones of its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of a chat answer."""

    content: list[ChosenToken]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of a completion: lists of equal length."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


def chat_logprobs(pieces: Sequence[Piece], codec: TextCodec | None) -> ChatLogprobs:
    """Of the pieces that have any."""
    content = []
    for piece in pieces:
        if piece.logprobs is not None:
            top = [_likely(codec, token, logprob) for token, logprob in piece.logprobs.top]
            chosen = _likely(codec, piece.token, piece.logprobs.chosen)
            content.append(
                ChosenToken(token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=top)
            )
    return ChatLogprobs(content=content)


def completion_logprobs(pieces: Sequence[Piece], codec: TextCodec | None) -> CompletionLogprobs:
    """Of the pieces that have any."""
    offsets, values, tokens, tops = [], [], [], []
    for piece in pieces:
        if piece.logprobs is not None:
            offsets.append(piece.start)
            values.append(piece.logprobs.chosen)
            tokens.append(_text(codec, piece.token))
            likeliest: dict[str, float] = {}
            for token, logprob in piece.logprobs.top:
                # Likeliest first: of several tokens with the same text that one is told.
                likeliest.setdefault(_text(codec, token), logprob)
            tops.append(likeliest)
    return CompletionLogprobs(text_offset=offsets, token_logprobs=values, tokens=tokens, top_logprobs=tops)


def _likely(codec: TextCodec | None, token: int, logprob: float) -> LikelyToken:
    known = None if codec is None else codec.token_bytes(token)
    return LikelyToken(token=_text(codec, token), logprob=logprob, bytes=None if known is None else list(known))


def _text(codec: TextCodec | None, token: int) -> str:
    """The token as text; its number where there is no tokenizer."""
    return f"token_id:{token}" if codec is None else codec.token_text(token)
