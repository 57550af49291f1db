"""Faults become due at their moments, each once."""

from __future__ import annotations

from collections.abc import Sequence

from dejavu.control.faults import AtPhase, AtStep, AtTime, Fault, FaultAction, FaultSchedule
from dejavu.ids import WorkerName

W1, W2 = WorkerName("w1"), WorkerName("w2")


def kill_at_step(step: int, *, microbatch: int = 0, worker: WorkerName = W2) -> Fault:
    return Fault(kind="kill", worker=worker, trigger=AtStep(microbatch=microbatch, step=step))


def told(actions: Sequence[FaultAction]) -> list[tuple[str, str]]:
    return [(action.kind, action.worker) for action in actions]


def test_a_fault_at_a_step_is_due_when_its_microbatch_has_finished_it_and_never_again() -> None:
    schedule = FaultSchedule([kill_at_step(3, microbatch=1)])
    assert not schedule.stepped(0, 3, 0.0)
    assert not schedule.stepped(1, 2, 0.0)
    (action,) = schedule.stepped(1, 3, 0.0)
    assert (action.kind, action.worker, action.why) == ("kill", W2, "step 3 of microbatch 1")
    assert schedule.is_over
    assert not schedule.stepped(1, 3, 1.0)


def test_a_step_that_was_jumped_over_counts_as_reached() -> None:
    assert told(FaultSchedule([kill_at_step(3)]).stepped(0, 7, 0.0)) == [("kill", W2)]


def test_a_step_that_is_made_again_after_a_repair_strikes_only_those_who_wait_for_it() -> None:
    schedule = FaultSchedule([kill_at_step(3), kill_at_step(5, worker=W1)])
    assert told(schedule.stepped(0, 3, 0.0)) == [("kill", W2)]
    assert not schedule.stepped(0, 3, 1.0)
    assert told(schedule.stepped(0, 5, 2.0)) == [("kill", W1)]


def test_faults_of_one_moment_come_together_in_the_order_of_their_declaration() -> None:
    schedule = FaultSchedule([kill_at_step(3), kill_at_step(3, worker=W1)])
    assert told(schedule.stepped(0, 3, 0.0)) == [("kill", W2), ("kill", W1)]


def test_times_count_from_the_beginning_of_serving_and_nothing_is_due_before_it() -> None:
    schedule = FaultSchedule([Fault(kind="kill", worker=W1, trigger=AtTime(at_s=2.0))])
    assert not schedule.now(1000.0)
    assert schedule.next_s is None
    assert not schedule.began(1000.0)
    assert schedule.next_s == 1002.0
    assert not schedule.now(1001.9)
    (action,) = schedule.now(1002.0)
    assert action.why == "2 s after serving began"
    assert schedule.is_over


def test_a_fault_at_time_0_is_due_as_serving_begins() -> None:
    schedule = FaultSchedule([Fault(kind="kill", worker=W1, trigger=AtTime(at_s=0.0))])
    assert told(schedule.began(5.0)) == [("kill", W1)]


def test_the_origin_of_times_does_not_move() -> None:
    schedule = FaultSchedule([Fault(kind="kill", worker=W1, trigger=AtTime(at_s=2.0))])
    schedule.began(10.0)
    schedule.began(11.0)
    assert schedule.next_s == 12.0


def test_a_fault_at_a_phase_is_due_when_the_run_first_comes_to_it() -> None:
    schedule = FaultSchedule([Fault(kind="kill", worker=W1, trigger=AtPhase(phase="restore"))])
    assert not schedule.phase("fence", 0.0)
    assert told(schedule.phase("restore", 0.0)) == [("kill", W1)]
    assert not schedule.phase("restore", 1.0)


def test_a_stop_with_an_end_is_followed_by_its_resume_once() -> None:
    stop = Fault(kind="stop", worker=W1, trigger=AtStep(microbatch=0, step=1), for_s=3.0)
    schedule = FaultSchedule([stop])
    assert told(schedule.stepped(0, 1, 100.0)) == [("stop", W1)]
    assert not schedule.is_over
    assert schedule.next_s == 103.0
    assert not schedule.now(102.9)
    (action,) = schedule.now(103.5)
    assert (action.kind, action.worker, action.why) == ("resume", W1, "after 3 s")
    assert schedule.is_over
    assert not schedule.now(200.0)


def test_a_stop_without_an_end_is_for_ever() -> None:
    schedule = FaultSchedule([Fault(kind="stop", worker=W1, trigger=AtPhase(phase="prompt"))])
    assert told(schedule.phase("prompt", 0.0)) == [("stop", W1)]
    assert schedule.is_over


def test_a_partition_and_a_slow_worker_keep_their_numbers() -> None:
    schedule = FaultSchedule(
        [
            Fault(kind="partition", worker=W1, trigger=AtTime(at_s=0.0), for_s=4.0),
            Fault(kind="slow", worker=W2, trigger=AtTime(at_s=0.0), delay_s=0.05),
        ]
    )
    partition, slow = schedule.began(0.0)
    assert (partition.kind, partition.for_s) == ("partition", 4.0)
    assert (slow.kind, slow.delay_s) == ("slow", 0.05)
    assert schedule.is_over


def test_no_faults_are_over_from_the_start() -> None:
    schedule = FaultSchedule(())
    assert schedule.is_over
    assert not schedule.began(0.0)
