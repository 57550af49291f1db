"""Faults are carried out on the launcher's processes."""

from __future__ import annotations

import logging
import signal
import threading

import pytest

from dejavu.clock import SystemClock, VirtualClock
from dejavu.control.faults import AtPhase, AtStep, AtTime, Fault, FaultSchedule
from dejavu.ids import WorkerName
from dejavu.workflows.injection import Injector, faults_of

from harness.cluster_kit import configured

W1, W2 = WorkerName("w1"), WorkerName("w2")
STEP_20 = AtStep(microbatch=0, step=20)


class Struck:
    """A launcher that notes what was done to whom."""

    def __init__(self) -> None:
        self.done: list[tuple[WorkerName, int | bytes]] = []
        self.any = threading.Event()

    def signal(self, name: WorkerName, signum: int) -> None:
        self.done.append((name, signum))
        self.any.set()

    def tell(self, name: WorkerName, line: bytes) -> None:
        self.done.append((name, line))
        self.any.set()


def still(*faults: Fault) -> tuple[Injector, Struck, VirtualClock]:
    """An injector whose thread has ended: a test looks at the time itself."""
    struck, clock = Struck(), VirtualClock(100.0)
    injector = Injector(FaultSchedule(faults), struck, clock)
    injector.close()
    return injector, struck, clock


def test_a_kill_is_a_signal_from_outside_and_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    injector, struck, _ = still(Fault(kind="kill", worker=W2, trigger=STEP_20))
    with caplog.at_level(logging.WARNING):
        injector.stepped(0, 19)
        injector.stepped(0, 20)
        injector.stepped(0, 20)
    assert struck.done == [(W2, signal.SIGKILL)]
    assert [record.getMessage() for record in caplog.records] == ["fault: kill w2 (step 20 of microbatch 0)"]


def test_a_stopped_worker_goes_on_at_its_time() -> None:
    injector, struck, clock = still(Fault(kind="stop", worker=W1, trigger=AtPhase(phase="fence"), for_s=2.0))
    injector.phase("fence")
    clock.advance(1.9)
    injector.look()
    assert struck.done == [(W1, signal.SIGSTOP)]
    clock.advance(0.2)
    injector.look()
    assert struck.done == [(W1, signal.SIGSTOP), (W1, signal.SIGCONT)]


def test_partition_and_slowness_are_lines_that_the_worker_reads() -> None:
    injector, struck, clock = still(
        Fault(kind="partition", worker=W1, trigger=AtTime(at_s=0.0), for_s=5.0),
        Fault(kind="slow", worker=W2, trigger=AtTime(at_s=1.0), delay_s=0.05),
    )
    injector.began()
    clock.advance(1.0)
    injector.look()
    assert struck.done == [(W1, b'{"partition_s":5.0}'), (W2, b'{"slow_s":0.05}')]


def test_a_timed_fault_strikes_without_anybody_telling_the_injector() -> None:
    struck = Struck()
    with Injector(
        FaultSchedule([Fault(kind="kill", worker=W1, trigger=AtTime(at_s=0.01))]), struck, SystemClock()
    ) as i:
        i.began()
        assert struck.any.wait(30.0)
    assert struck.done == [(W1, signal.SIGKILL)]


def test_the_thread_ends_with_the_last_fault_and_with_close() -> None:
    never = Fault(kind="kill", worker=W1, trigger=AtTime(at_s=1e6))
    injector = Injector(FaultSchedule([never]), Struck(), SystemClock())
    injector.began()
    injector.close()
    injector.close()
    assert "fault-injector" not in {thread.name for thread in threading.enumerate()}


def test_without_faults_there_is_no_thread() -> None:
    with Injector(FaultSchedule(()), Struck(), SystemClock()) as injector:
        assert "fault-injector" not in {thread.name for thread in threading.enumerate()}
        injector.began()
        injector.stepped(0, 1)
        injector.phase("prompt")


def test_the_declared_faults_become_values_in_the_groups_order() -> None:
    config = configured(
        "strategy.split.token=2",
        "fault.slow=[{worker: w0, phase: handoff, delay_s: 0.1}]",
        "fault.kill=[{worker: w2, step: 20, microbatch: 1}]",
        "fault.stop=[{worker: w1, at_s: 3, for_s: 10}]",
        "fault.partition=[{worker: w1, step: 2, for_s: 1}]",
    )
    assert faults_of(config.fault) == (
        Fault(kind="kill", worker=W2, trigger=AtStep(microbatch=1, step=20)),
        Fault(kind="stop", worker=W1, trigger=AtTime(at_s=3.0), for_s=10.0),
        Fault(kind="partition", worker=W1, trigger=AtStep(microbatch=0, step=2), for_s=1.0),
        Fault(kind="slow", worker=WorkerName("w0"), trigger=AtPhase(phase="handoff"), delay_s=0.1),
    )
