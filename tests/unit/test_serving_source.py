"""Requests that come while the controller serves."""

from __future__ import annotations

import math

from dejavu.ids import RequestId
from dejavu.request import Request
from dejavu.serving.source import Arrival, Cancellation, ListedSource, LiveSource, Submission


def submission(name: str, arrival_s: float = 0.0) -> Submission:
    return Submission(request=Request(id=RequestId(name), prompt_tokens=(1,), max_tokens=1, arrival_s=arrival_s))


def told(arrivals: list[Arrival]) -> list[str]:
    return [one.request.id if isinstance(one, Submission) else f"-{one.request_id}" for one in arrivals]


def test_a_list_is_taken_as_it_is_due_and_then_there_is_no_more() -> None:
    source = ListedSource([submission("late", 2.0).request, submission("early", 1.0).request])
    assert source.wait_s(0.25) == 0.75
    assert told(list(source.take(1.5))) == ["early"]
    assert told(list(source.take(2.0))) == ["late"]
    assert source.wait_s(2.0) is None


def test_whatever_comes_is_taken_in_its_order_and_wakes_the_controller() -> None:
    wakes: list[None] = []
    source = LiveSource(lambda: wakes.append(None))
    assert source.wait_s(0.0) == math.inf
    source.submit(submission("a"))
    source.cancel(Cancellation(request_id=RequestId("a")))
    source.submit(submission("b"))
    assert (source.wait_s(0.0), len(wakes)) == (0.0, 3)
    assert told(list(source.take(0.0))) == ["a", "-a", "b"]
    assert source.take(0.0) == []


def test_a_deadline_is_a_cancellation_that_comes_by_itself() -> None:
    source = LiveSource(lambda: None)
    source.submit(submission("slow"), deadline_s=5.0)
    source.submit(submission("slower"), deadline_s=7.0)
    assert told(list(source.take(0.0))) == ["slow", "slower"]
    assert source.wait_s(1.0) == 4.0
    (ended,) = source.take(5.0)
    assert isinstance(ended, Cancellation)
    assert (ended.request_id, ended.finish_reason) == ("slow", "timeout")
    assert source.wait_s(5.0) == 2.0


def test_a_closed_source_ends_once_all_was_taken() -> None:
    source = LiveSource(lambda: None)
    source.submit(submission("a"), deadline_s=9.0)
    source.close()
    assert source.wait_s(0.0) == 0.0
    source.take(0.0)
    assert source.wait_s(0.0) is None
