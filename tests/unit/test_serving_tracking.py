"""One request's tokens, text and ending."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from dejavu.control.admission import Assigned, Slot
from dejavu.ids import RequestId, RowId
from dejavu.request import Request
from dejavu.serving.tracking import Tracked, limits_of, refusal_of, refused

EOS = 9


class Letters:
    """Token n is the n-th letter; EOS has no text."""

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in tokens if token != EOS)


def request(**values: object) -> Request:
    defaults = {"id": RequestId("r"), "prompt_tokens": (1, 2, 3), "max_tokens": 4}
    return Request(**{**defaults, **values})  # type: ignore[arg-type]


def tracked(codec: Letters | None = None, **values: object) -> Tracked:
    made = request(**values)
    return Tracked(request=made, limits=limits_of(made, (EOS,)), codec=codec)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prompt_tokens": ()}, "empty"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 6}, "3 tokens .* 6 = 9 exceeds .* 8"),
        ({"prompt_tokens": (1, 10)}, r"token id 10 .*\[0, 10\)"),
        ({"prompt_tokens": (1, -1)}, "token id -1"),
        ({"refusal": "no such field"}, "no such field"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_the_values(values: dict[str, object], words: str) -> None:
    reason = refusal_of(request(**values), max_length=8, vocab_size=10)
    assert reason is not None
    assert re.search(words, reason)


def test_a_request_that_just_fits_is_not_refused() -> None:
    assert refusal_of(request(max_tokens=5), max_length=8, vocab_size=4) is None


def test_a_refused_request_has_a_line_without_tokens() -> None:
    line = refused(request(prompt_text="hello", arrival_s=1.0), "too long", 2.0)
    assert (line.finish_reason, line.error, line.tokens, line.first_token_s) == ("error", "too long", (), None)
    assert (line.arrival_s, line.end_s, line.prompt) == (1.0, 2.0, "hello")


def test_tokens_end_at_the_limit() -> None:
    row = tracked(max_tokens=2)
    assert row.take(1, 0.5) is None
    assert row.take(2, 0.7) == "length"
    line = row.completion("length", 0.8)
    assert (line.tokens, line.first_token_s, line.end_s, line.text) == ((1, 2), 0.5, 0.8, "")


def test_eos_ends_a_request_and_is_among_its_tokens_and_not_in_its_text() -> None:
    row = tracked(Letters())
    assert row.take(1, 0.0) is None
    assert row.take(EOS, 0.0) == "stop"
    line = row.completion("stop", 0.0)
    assert (line.tokens, line.text) == ((1, EOS), "b")


def test_a_request_that_ignores_eos_goes_on() -> None:
    assert tracked(ignore_eos=True).take(EOS, 0.0) is None


def test_a_stop_string_over_several_tokens_ends_the_request_and_is_cut_off() -> None:
    row = tracked(Letters(), stop=("cd", "x"))
    assert [row.take(token, 0.0) for token in (0, 1, 2)] == [None, None, None]
    assert row.take(3, 0.0) == "stop"
    assert row.completion("stop", 0.0).text == "ab"


def test_a_stop_string_wins_over_the_limit_that_it_meets() -> None:
    row = tracked(Letters(), stop=("a",), max_tokens=1)
    assert row.take(0, 0.0) == "stop"
    assert row.completion("stop", 0.0).text == ""


def test_a_stop_string_without_a_tokenizer_is_passed_over() -> None:
    assert tracked(None, stop=("a",)).take(0, 0.0) is None


def test_a_stop_string_in_what_was_held_back_to_the_end_ends_the_request_too() -> None:
    class Halves(Letters):
        """Each token ends in the middle of a character."""

        def decode(self, tokens: Sequence[int]) -> str:
            return "".join(f"{super(Halves, self).decode([token])}\N{REPLACEMENT CHARACTER}" for token in tokens)

    row = tracked(Halves(), stop=("b",), max_tokens=2)
    assert row.take(0, 0.0) is None
    assert row.take(1, 0.0) == "stop"
    assert row.completion("stop", 0.0).text == "a\N{REPLACEMENT CHARACTER}"


def test_an_error_before_the_first_token_has_no_first_token_time() -> None:
    line = tracked().completion("error", 1.0, error="lost")
    assert (line.first_token_s, line.error) == (None, "lost")


def with_tokens(*tokens: int, replayed: int = 0) -> Tracked:
    row = tracked(max_tokens=20)
    for token in tokens:
        row.take(token, 0.1 * token)
    row.replayed = replayed
    return row


ROW = Assigned(request=request(), row_id=RowId(7), slot=Slot(microbatch=1, row_index=2))


def test_a_row_that_goes_on_takes_its_newest_token_next() -> None:
    admitted = with_tokens(4, 5, 6).admitted(ROW, ready_stages=3)
    assert (admitted.row_id, admitted.microbatch, admitted.row_index) == (RowId(7), 1, 2)
    assert (admitted.position, admitted.token, admitted.num_generated) == (5, 6, 3)
    assert (admitted.known, admitted.ready_stages) == ((), 3)


def test_a_row_that_is_behind_takes_the_tokens_that_are_known_one_by_one() -> None:
    admitted = with_tokens(4, 5, 6, replayed=2).admitted(ROW)
    assert (admitted.position, admitted.token, admitted.num_generated, admitted.known) == (3, 4, 1, (5, 6))


def test_a_row_whose_first_token_is_made_again_begins_at_its_prompts_last() -> None:
    admitted = with_tokens(4, 5, replayed=2).admitted(ROW)
    assert (admitted.position, admitted.token, admitted.num_generated, admitted.known) == (2, 3, 0, (4, 5))


def test_tokens_that_are_made_again_are_not_given_out_twice_and_must_be_the_same() -> None:
    row = with_tokens(4, 5, 6, replayed=2)
    assert (row.num_done, row.take_again(5), row.num_done) == (1, True, 2)
    assert (row.take_again(9), row.replayed) == (False, 0)
    row.take(8, 1.0)
    assert (row.tokens, len(row.token_times_s)) == ([4, 5, 6, 8], 4)


def test_a_repair_counts_and_strikes_add_up_only_while_no_token_comes_between() -> None:
    row = with_tokens(4)
    for strikes in (1, 2, 3):
        row.survive(is_another=True)
        assert row.strikes == strikes
    row.take(5, 1.0)
    row.survive(is_another=True)
    assert (row.strikes, row.resumed) == (1, 4)
    assert row.completion("length", 2.0).resumed == 4


def test_a_failure_before_the_first_token_is_a_strike_too() -> None:
    row = with_tokens()
    row.survive(is_another=True)
    row.survive(is_another=True)
    assert row.strikes == 2


def test_a_stop_string_over_tokens_from_both_sides_of_a_repair_ends_the_request() -> None:
    row = tracked(Letters(), stop=("cd",))
    for token in (0, 1, 2):
        assert row.take(token, 0.0) is None
    row.survive(is_another=True)
    row.replayed = 2
    assert [row.take_again(token) for token in (1, 2)] == [True, True]
    assert row.take(3, 0.0) == "stop"
    assert row.completion("stop", 0.0).text == "ab"
