"""How log-probabilities are told of tokens that are no text by themselves, or the same one."""

from __future__ import annotations

from dejavu.api.following import Piece
from dejavu.api.logprobs import chat_logprobs, completion_logprobs
from dejavu.request import TokenLogprobs


class Bytes:
    """Token n is the byte n; 0 and 1 are spelled alike, and nothing is known of 2."""

    def token_text(self, token: int) -> str:
        return "same" if token < 2 else f"<{token}>"

    def token_bytes(self, token: int) -> bytes | None:
        return None if token == 2 else bytes([token])


def piece(token: int, *top: tuple[int, float]) -> Piece:
    return Piece(token, "", 0, TokenLogprobs(-0.5, top))


def test_of_tokens_with_the_same_text_the_likeliest_ones_value_is_told() -> None:
    """The last one's stood there, which is the least likely."""
    told = completion_logprobs([piece(5, (0, -0.1), (1, -2.0), (5, -3.0))], Bytes())  # type: ignore[arg-type]
    assert [list(top.items()) for top in told.top_logprobs] == [[("same", -0.1), ("<5>", -3.0)]], "likeliest first"


def test_the_bytes_of_tokens_joined_are_the_text_and_unknown_ones_are_null() -> None:
    pieces = [piece(byte) for byte in "é".encode()]
    told = chat_logprobs([*pieces, piece(2)], Bytes()).content  # type: ignore[arg-type]
    assert [one.bytes for one in told] == [[0xC3], [0xA9], None]


def test_without_a_tokenizer_tokens_are_told_by_their_numbers() -> None:
    (told,) = chat_logprobs([piece(7, (8, -1.0))], None).content
    assert (told.token, told.bytes, told.top_logprobs[0].token) == ("token_id:7", None, "token_id:8")
