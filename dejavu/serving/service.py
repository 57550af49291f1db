"""A controller that serves whoever comes, from any thread, until it is drained."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dejavu.clock import Clock
from dejavu.control.plan import Plan
from dejavu.errors import DejavuError, Retryable
from dejavu.ids import Epoch, RequestId
from dejavu.request import Request
from dejavu.serving.controller import Controller
from dejavu.serving.followed import Followed
from dejavu.serving.source import Arrival, Cancellation, Listener, LiveSource, Submission
from dejavu.serving.tally import Counts, Tally
from dejavu.serving.tracking import refusal_of

logger = logging.getLogger(__name__)

_STOPPING = "the service is stopping"
_ABORT_WAIT_S = 5.0
"""For what is still open at the end of a drain: an abort takes a step or two, or the end of a prompt."""


class RequestRefused(DejavuError):
    """The request can never be served; the message names limit and value."""


class QueueFull(Retryable):
    """As many requests wait as may."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotServing(Retryable):
    """Nothing is taken any more: the service is stopping, or its cluster has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSnapshot:
    """One moment of a service."""

    counts: Counts
    rows: int
    rows_taken: int
    plan: Plan
    not_ready: str | None
    """Why no request would run just now."""
    is_draining: bool
    uptime_s: float

    @property
    def epoch(self) -> Epoch:
        """Of the plan in force."""
        return self.plan.epoch


class Service:
    """Every method may be called from any thread but ``run``, ``take`` and ``wait_s``, which are the controller's.

    Args:
        max_queue: requests that may be open beyond the token pipeline's rows.
        request_timeout_s: a request that is open for longer ends with ``timeout``; None: never.
    """

    def __init__(
        self, controller: Controller, clock: Clock, *, max_queue: int, request_timeout_s: float | None = None
    ) -> None:
        self._controller = controller
        self._clock = clock
        self._max_queue = max_queue
        self._request_timeout_s = request_timeout_s
        self._start_s = clock.monotonic()
        self._source = LiveSource(controller.wake)
        self._standing = controller.standing
        self._tally = Tally()
        self._door = threading.Lock()
        """Whoever enters does so before the service ends, and then hears of that end."""
        self._is_draining = False
        self._failure: str | None = None
        self._over = threading.Event()

    def run(self) -> None:
        """The service has been drained. Raises what ended it otherwise; open requests have ended with the reason."""
        try:
            self._controller.run(self, start_s=self._start_s)
        except BaseException as error:
            # Whatever it was: nobody may wait for an answer that will never come.
            self._fail(str(error).partition("\n")[0] or type(error).__name__)
            raise
        finally:
            self._over.set()

    def submit(self, request: Request, listener: Listener) -> None:
        """The request is open, and its listener hears of it, to its end, exactly once.

        Raises RequestRefused, QueueFull or NotServing; then the listener hears nothing.
        """
        now_s = self.now_s()
        deadline_s = None if self._request_timeout_s is None else now_s + self._request_timeout_s
        arrived = msgspec.structs.replace(request, arrival_s=now_s)
        with self._door:
            try:
                self._check(request)
            except DejavuError:
                self._tally.rejected()
                raise
            self._tally.opened(request.id)
            submission = Submission(request=arrived, listener=Followed(self._tally, arrived, listener))
            self._source.submit(submission, deadline_s=deadline_s)

    def refused(self) -> None:
        """Something was asked for that is no request, and counts as a rejected one."""
        self._tally.rejected()

    def cancel(self, request_id: RequestId, *, error: str | None = None) -> None:
        """The request ends soon with ``abort``, unless it has ended: its row is given back everywhere."""
        self._source.cancel(Cancellation(request_id=request_id, error=error))

    def begin_drain(self) -> None:
        """Nothing new is taken; what is open goes on."""
        with self._door:
            self._is_draining = True

    def drain(self, timeout_s: float) -> bool:
        """Nothing is open and ``run`` has returned, or will not. Returns whether all ended by themselves: what is
        still open after so many seconds is aborted."""
        self.begin_drain()
        left = self._tally.wait_empty(timeout_s)
        for request_id in left:
            self.cancel(request_id, error=_STOPPING)
        self._source.close()
        return self._over.wait(_ABORT_WAIT_S) and not left and self._failure is None

    def now_s(self) -> float:
        """Seconds since the service began; the times of completions are in these."""
        return self._clock.monotonic() - self._start_s

    def why_not_ready(self) -> str | None:
        """Why no request would run just now; None while there is a whole way for prompts and tokens."""
        if self._failure is not None:
            return f"the cluster failed: {self._failure}"
        if self._is_draining:
            return _STOPPING
        standing = self._standing
        if not standing.is_between:
            lost = ", ".join(standing.lost)
            return f"the link of {lost} is lost; whether that takes a repair is being found out" if lost else None
        what = "a change of the declared state" if standing.is_changing else "a repair"
        return f"{what} is under way after epoch {standing.plan.epoch}"

    def snapshot(self) -> ServiceSnapshot:
        """The numbers of this moment."""
        standing = self._standing
        return ServiceSnapshot(
            counts=self._tally.counts(),
            rows=standing.num_rows,
            rows_taken=standing.num_rows_taken,
            plan=standing.plan,
            not_ready=self.why_not_ready(),
            is_draining=self._is_draining,
            uptime_s=self.now_s(),
        )

    def take(self, now_s: float) -> Sequence[Arrival]:
        """See ``Source``."""
        self._standing = self._controller.standing
        return self._source.take(now_s)

    def wait_s(self, now_s: float) -> float | None:
        """See ``Source``."""
        return self._source.wait_s(now_s)

    def _check(self, request: Request) -> None:
        if self._failure is not None or self._is_draining:
            raise NotServing(self.why_not_ready() or _STOPPING)
        model = self._standing.plan.model
        reason = refusal_of(request, max_length=model.max_length, vocab_size=model.vocab_size)
        if reason is not None:
            raise RequestRefused(reason)
        num_waiting = self._tally.num_open - self._standing.num_rows
        if num_waiting >= self._max_queue:
            raise QueueFull(
                f"{num_waiting} requests wait already, and serve.max_queue is {self._max_queue}",
                retry_after_s=math.ceil(self._tally.next_place_s),
            )

    def _fail(self, reason: str) -> None:
        with self._door:
            self._failure = reason
        self._controller.abandon(f"the cluster failed: {reason}", self._source.take(self.now_s()))
