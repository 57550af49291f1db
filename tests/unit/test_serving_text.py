"""A request's text as it grows: nothing of a stop string is given out, and nothing that is certain is kept."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from dejavu.serving.growing_text import GrowingText


class Letters:
    """Token n is the n-th letter."""

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


letters = st.integers(0, 2)
stop_strings = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def grow(tokens: Sequence[int], stops: Sequence[str]) -> tuple[list[str], GrowingText]:
    """What is given out at each token until a stop string is there."""
    growing, given_out = GrowingText(Letters(), stops), []  # type: ignore[arg-type]
    for token in tokens:
        is_stopped = growing.push(token)
        given_out.append(growing.take())
        if is_stopped:
            break
    return given_out, growing


@settings(deadline=None, max_examples=300)
@given(tokens=st.lists(letters, max_size=20), stops=stop_strings)
def test_what_is_given_out_is_the_text_up_to_the_first_stop_string(tokens: list[int], stops: list[str]) -> None:
    given_out, growing = grow(tokens, stops)
    text = Letters().decode(tokens[: len(given_out)])
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    whole = text[: min(found)] if found else text
    assert growing.before_stop == (whole if found else None)
    assert "".join(given_out) + growing.rest_of(whole) == whole


@settings(deadline=None, max_examples=300)
@given(tokens=st.lists(letters, max_size=20), stops=stop_strings)
def test_nothing_is_given_out_that_may_yet_be_cut_off_and_no_more_is_kept_than_that(
    tokens: list[int], stops: list[str]
) -> None:
    given_out, growing = grow(tokens, stops)
    if growing.before_stop is not None:
        return
    text, sent = Letters().decode(tokens), "".join(given_out)
    kept = text[len(sent) :]
    assert all(not stop.startswith(text[at:]) for stop in stops for at in range(len(sent)))
    assert not kept or any(stop.startswith(kept) for stop in stops)


def test_a_stop_string_across_many_tokens_is_found() -> None:
    given_out, growing = grow([0, 1, 2, 0, 1, 0], ["abab", "caba"])
    assert (given_out, growing.before_stop) == (["", "", "ab", "", "", ""], "ab")
