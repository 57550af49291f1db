"""One daemon thread that runs jobs and timers and sleeps, at no cost, while there is nothing to do."""

from __future__ import annotations

import heapq
import itertools
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Protocol, TypeVar

from dejavu.transport.core import Cancel, Job

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class Poller(Protocol):
    """A library that wants to be driven by the loop's thread."""

    def fileno(self) -> int:
        """Readable when the library has something to do, once ``arm`` has returned True."""

    def poll(self) -> bool:
        """Does what is due without waiting; True when anything happened."""

    def arm(self) -> bool:
        """True when the loop may sleep on ``fileno``."""


class JobLoop:
    """The thread. ``start`` it once; after ``stop`` jobs are dropped."""

    def __init__(self, name: str) -> None:
        self._jobs: deque[Job] = deque()
        self._timers: list[tuple[float, int, list[Job]]] = []
        self._timer_numbers = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._poller: Poller | None = None
        self._running = True
        self._may_sleep = False
        """Set before the loop looks for jobs a last time, so that whoever adds one afterwards knows to wake it."""
        self._submit_lock = threading.Lock()
        self._stop_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """The thread runs."""
        self._thread.start()

    def drive(self, poller: Poller | None) -> None:
        """The loop drives this library from now on (or none). On the loop's thread."""
        if self._poller is not None:
            self._selector.unregister(self._poller.fileno())
        self._poller = poller
        if poller is not None:
            self._selector.register(poller.fileno(), selectors.EVENT_READ)

    def on_own_thread(self) -> bool:
        """True when called by a job."""
        return threading.current_thread() is self._thread

    def submit(self, job: Job) -> bool:
        """The job runs soon, after those submitted before. Any thread; False, and no run, once the loop is stopped."""
        with self._submit_lock:
            if not self._running:
                return False
            self._jobs.append(job)
            if self._may_sleep and not self.on_own_thread():
                # Once is enough, and each costs the submitting thread a system call.
                self._may_sleep = False
                self._wake()
        return True

    def call(self, job: Callable[[], Result], timeout_s: float) -> Result:
        """Returns what the job returned or raises what it raised; TimeoutError when it does not run in time."""
        if self.on_own_thread():
            return job()
        future: Future[Result] = Future()
        if not self.submit(lambda: _settle(future, job)):
            raise TimeoutError("the transport's thread has ended")
        try:
            return future.result(timeout_s)
        except FutureTimeout as error:  # Not the built-in class before Python 3.11.
            raise TimeoutError(f"the transport's thread did not answer within {timeout_s} s") from error

    def later(self, delay_s: float, job: Job) -> Cancel:
        """The job runs after the delay. On the loop's thread; so is the returned cancellation."""
        slot = [job]
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_numbers), slot))
        return slot.clear

    def stop(self) -> None:
        """The thread has ended and its file descriptors are closed. Idempotent; not from the loop's thread."""
        with self._stop_lock:
            if not self._running:
                return
            with self._submit_lock:
                self._running = False
                self._wake()
            self._thread.join()
            self._selector.close()
            self._wake_reader.close()
            self._wake_writer.close()

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"\0")
        except BlockingIOError:
            pass  # The pipe is full of wake-ups, so the loop wakes anyway.

    def _run(self) -> None:
        while self._running:
            busy = self._run_jobs()
            busy |= self._run_timers()
            if self._poller is not None:
                busy |= self._guarded(self._poller.poll)
            if not busy:
                self._sleep()
        self._run_jobs()  # Whatever was accepted before the end is done.

    def _run_jobs(self) -> bool:
        count = len(self._jobs)
        for _ in range(count):
            self._guarded(self._jobs.popleft())
        return count > 0

    def _run_timers(self) -> bool:
        ran = False
        while self._timers and self._timers[0][0] <= time.monotonic():
            for job in tuple(heapq.heappop(self._timers)[2]):
                self._guarded(job)
                ran = True
        return ran

    def _guarded(self, job: Callable[[], bool | None]) -> bool:
        try:
            return bool(job())
        except Exception:  # The one thread of all links must outlive a mistake that concerns one of them.
            logger.exception("a job of the transport's thread failed")
            return True

    def _sleep(self) -> None:
        if self._poller is not None and not self._poller.arm():
            return
        while self._timers and not self._timers[0][2]:
            heapq.heappop(self._timers)  # Cancelled: not worth waking up for.
        timeout_s = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        self._may_sleep = True
        if self._jobs:
            self._may_sleep = False
            return
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._wake_reader:
                self._drain_wake_ups()
        self._may_sleep = False

    def _drain_wake_ups(self) -> None:
        try:
            while self._wake_reader.recv(4096):
                pass
        except BlockingIOError:
            return


def _settle(future: Future[Result], job: Callable[[], Result]) -> None:
    try:
        future.set_result(job())
    except Exception as error:  # Whatever the job raises belongs to the thread that waits for it.
        future.set_exception(error)
