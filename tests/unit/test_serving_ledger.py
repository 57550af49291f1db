"""The controller's books: when rows are released, tokens that are made again, and whom an observer's fault hits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dejavu.ids import RequestId, RowId
from dejavu.request import Completion, Request, TokenLogprobs
from dejavu.serving.ledger import Ledger
from dejavu.serving.source import Cancellation, Submission

from harness.plans import colocated_plan


class Observer:
    """Keeps the lines; fails where it is told to."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failure: Exception | None = None

    def token(self, request_id: RequestId, at_s: float) -> None:
        pass

    def ended(self, completion: Completion, token_times_s: Sequence[float]) -> None:
        if self.failure is not None:
            raise self.failure
        self.lines.append(completion.id)


class Ends:
    """A listener that keeps how its request ended."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reason: str | None = None

    def started(self) -> None:
        pass

    def token(self, token: int, text: str, start: int, logprobs: TokenLogprobs | None) -> None:
        self.tokens.append(token)

    def ended(self, completion: Completion, rest: str, num_cut: int) -> None:
        self.reason = completion.finish_reason


class Books:
    """A ledger, and what it has said of rows."""

    def __init__(self) -> None:
        self.plan = colocated_plan(1, in_flight=1)
        self.observer = Observer()
        self.progressed: list[RowId] = []
        self.ended: list[RowId] = []
        self.ledger = Ledger(self.plan, None, self.observer, progressed=self.progressed.append, ended=self.ended.append)

    def submit(self, name: str, max_tokens: int = 4) -> Ends:
        """The request is open."""
        ends = Ends()
        request = Request(id=RequestId(name), prompt_tokens=(4, 5), max_tokens=max_tokens)
        self.ledger.submit(Submission(request=request, listener=ends), 0.0)
        return ends

    def running(self, name: str = "r", *tokens: int) -> tuple[RowId, Ends]:
        """The row of a request that has these tokens."""
        ends = self.submit(name)
        (row,) = self.ledger.next_prompt()
        self.ledger.first_tokens([row.row_id], tokens[:1], (), 1.0)
        for token in tokens[1:]:
            self.ledger.next_tokens([row.row_id], [token], (), 1.0)
        return row.row_id, ends


@pytest.fixture
def books() -> Books:
    return Books()


def gone(name: str) -> Cancellation:
    return Cancellation(request_id=RequestId(name))


def test_a_row_whose_prompt_is_being_computed_is_released_when_that_is_done_and_not_before(books: Books) -> None:
    """Released before, it would be written by its prompt after it was another's."""
    ends = books.submit("r")
    (row,) = books.ledger.next_prompt()
    changes = books.ledger.cancel(gone("r"), 1.0)
    assert (changes.release, changes.admit, ends.reason) == ((), (), "abort")
    done = books.ledger.first_tokens([row.row_id], [7], (), 2.0)
    assert (done.release, done.admit, ends.tokens) == ((row.row_id,), (), [])
    assert books.ledger.first_tokens([row.row_id], [7], (), 3.0).release == (), "once"


def test_a_row_whose_prompt_fails_after_its_request_was_given_up_is_released_then(books: Books) -> None:
    books.submit("r")
    (row,) = books.ledger.next_prompt()
    assert books.ledger.cancel(gone("r"), 1.0).release == ()
    assert books.ledger.rows_failed([row.row_id], "no KV", while_prompt=True, now_s=2.0).release == (row.row_id,)


def test_a_row_that_runs_is_released_as_soon_as_its_request_is_given_up(books: Books) -> None:
    row_id, _ = books.running("r", 7, 8)
    assert books.ledger.cancel(gone("r"), 1.0).release == (row_id,)


def test_a_token_that_comes_out_otherwise_when_it_is_made_again_is_told_and_not_given_out(
    books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    row_id, ends = books.running("r", 7, 8)
    books.ledger.rows[row_id].replayed = 2
    books.ledger.next_tokens([row_id], [7], (), 2.0)
    assert caplog.records == []
    books.ledger.next_tokens([row_id], [9], (), 2.0)
    assert [record.getMessage() for record in caplog.records] == [
        "request r: a token came out otherwise when it was made again"
    ]
    books.ledger.next_tokens([row_id], [6], (), 2.0)
    assert ends.tokens == [7, 8, 6]


def test_a_token_is_progress_and_the_end_of_a_request_that_is_given_up_is_none(books: Books) -> None:
    row_id, _ = books.running("r", 7)
    assert (books.progressed, books.ended) == ([row_id], [])
    books.ledger.cancel(gone("r"), 1.0)
    assert (books.progressed, books.ended) == ([row_id], [row_id])


def test_a_request_has_its_end_although_an_observer_fails_of_it(books: Books) -> None:
    _, ends = books.running("r", 7)
    books.observer.failure = OSError("no space left")
    with pytest.raises(OSError, match="no space left"):
        books.ledger.cancel(gone("r"), 1.0)
    assert ends.reason == "abort"
    refused = Ends()
    with pytest.raises(OSError, match="no space left"):
        books.ledger.submit(
            Submission(request=Request(id=RequestId("empty"), prompt_tokens=(), max_tokens=1), listener=refused), 1.0
        )
    assert refused.reason == "error"


def test_all_open_requests_are_abandoned_although_an_observer_fails_of_each(books: Books) -> None:
    """The others waited for answers that would never come."""
    ends = [books.submit(name) for name in ("a", "b", "c")]
    books.observer.failure = OSError("no space left")
    books.ledger.abandon("the cluster failed", 1.0)
    assert [one.reason for one in ends] == ["error"] * 3
    assert books.ledger.num_open == 0
