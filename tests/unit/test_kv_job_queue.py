"""The queue between the computation and the streamer's thread, alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from dejavu.ids import RowId
from dejavu.kv.job_queue import JobQueue
from dejavu.kv.jobs import RowsJob
from dejavu.kv.pool import KvPool
from dejavu.kv.stream_account import StreamStalled

from harness.streamer_kit import LAYERS, beside, numbered_pool, pool_row

WAIT_S = 30.0


@pytest.fixture(scope="module")
def pool() -> KvPool:
    return numbered_pool()


@pytest.fixture
def job(pool: KvPool) -> Callable[..., RowsJob]:
    """Makes a job that reads the given places; the row at place n is row 10 + n."""

    def make(*places: int) -> RowsJob:
        rows = tuple(pool_row(RowId(10 + place), place, 1) for place in places)
        return RowsJob(pool=pool, rows=rows, layers=LAYERS, after=None, made_by="step")

    return make


MakeJob = Callable[..., RowsJob]


def test_jobs_are_taken_in_the_order_in_which_they_were_put(job: MakeJob) -> None:
    queue, jobs = JobQueue(3), [job(0), job(1), job(2)]
    for one in jobs:
        queue.put(one, 0)
    assert [queue.take() for _ in jobs] == jobs


def test_a_queue_that_takes_no_job_is_refused() -> None:
    with pytest.raises(ValueError, match="a queue of 0 jobs takes none"):
        JobQueue(0)


def test_a_full_queue_refuses_at_the_deadline_and_takes_again_once_a_job_was_taken(job: MakeJob) -> None:
    queue = JobQueue(2)
    queue.put(job(0), 0)
    queue.put(job(1), 0)
    with pytest.raises(StreamStalled, match=r"2 jobs \(2 queued\) had not left after 0 s"):
        queue.put(job(2), 0)
    queue.take()
    queue.put(job(2), 0)


def test_a_put_that_waits_goes_on_when_a_job_is_taken(job: MakeJob) -> None:
    queue, last = JobQueue(1), job(1)
    queue.put(job(0), 0)
    with beside(lambda: queue.put(last, WAIT_S)):
        queue.take()
    assert queue.take() is last


def test_a_take_that_waits_gets_the_next_job(job: MakeJob) -> None:
    queue, one, taken = JobQueue(1), job(0), Future()  # type: ignore[var-annotated]
    with beside(lambda: taken.set_result(queue.take())):
        queue.put(one, WAIT_S)
    assert taken.result(0) is one


def test_a_job_is_pending_until_it_is_finished_and_not_only_until_it_was_taken(job: MakeJob) -> None:
    queue = JobQueue(2)
    queue.drain(0)
    queue.put(job(0), 0)
    queue.take()
    queue.gathered()
    with pytest.raises(StreamStalled, match=r"1 jobs \(0 queued\)"):
        queue.drain(0)
    queue.finish()
    queue.drain(0)


def test_a_job_that_was_never_queued_is_pending_from_begin_to_finish() -> None:
    queue = JobQueue(1)
    queue.begin()
    with pytest.raises(StreamStalled):
        queue.drain(0)
    with beside(lambda: queue.drain(WAIT_S)):
        queue.finish()


def test_close_gives_the_abandoned_jobs_once_and_ends_takes_and_puts(job: MakeJob) -> None:
    queue, jobs = JobQueue(3), [job(0), job(1), job(2)]
    for one in jobs:
        queue.put(one, 0)
    assert queue.take() is jobs[0]
    assert queue.close() == (jobs[1], jobs[2])
    assert queue.close() == ()
    assert queue.take() is None
    with pytest.raises(StreamStalled, match="nothing is taken any more: the streamer is closed"):
        queue.put(job(0), 0)


def test_abandoned_jobs_stay_pending_until_they_are_finished(job: MakeJob) -> None:
    queue = JobQueue(1)
    queue.put(job(0), 0)
    queue.close()
    with pytest.raises(StreamStalled):
        queue.drain(0)
    queue.finish()
    queue.drain(0)


def test_close_wakes_a_take_that_waits() -> None:
    queue, taken = JobQueue(1), Future()  # type: ignore[var-annotated]
    with beside(lambda: taken.set_result(queue.take())):
        assert queue.close() == ()
    assert taken.result(0) is None


def test_close_wakes_a_put_that_waits(job: MakeJob) -> None:
    queue, refused = JobQueue(1), []
    queue.put(job(0), 0)

    def put() -> None:
        with pytest.raises(StreamStalled, match="closed"):
            queue.put(job(1), WAIT_S)
        refused.append(True)

    with beside(put):
        queue.close()
    assert refused == [True]


def test_settle_waits_for_a_job_that_is_being_read_and_only_for_one_that_reads_these_places(job: MakeJob) -> None:
    queue = JobQueue(1)
    queue.put(job(0, 2), 0)
    queue.take()
    queue.settle(frozenset({1, 3}), 0)
    for places in ({0}, {2, 3}):
        with pytest.raises(StreamStalled):
            queue.settle(frozenset(places), 0)
    queue.gathered()
    queue.settle(frozenset({0, 2}), 0)


def test_settle_takes_these_places_out_of_queued_jobs_and_leaves_the_others(job: MakeJob) -> None:
    queue = JobQueue(3)
    for one in (job(0, 1), job(1), job(2)):
        queue.put(one, 0)
    queue.settle(frozenset({1}), 0)
    taken = [queue.take() for _ in range(3)]
    assert [one.row_ids for one in taken if one is not None] == [(10,), (), (12,)]


class ToldJob:
    """Tells when it is asked, under the queue's lock, whether it reads a place: a wait follows before it is let go."""

    def __init__(self) -> None:
        self.was_asked = threading.Event()

    def reads(self, places: frozenset[int]) -> bool:
        self.was_asked.set()
        return True


def test_a_settle_that_waits_goes_on_when_the_job_has_been_read() -> None:
    queue, told = JobQueue(1), ToldJob()
    queue.put(told, 0)  # type: ignore[arg-type]
    queue.take()
    with beside(lambda: queue.settle(frozenset({0}), 2 * WAIT_S)):
        assert told.was_asked.wait(WAIT_S)
        queue.gathered()
