"""One batch of a measurement: served at a streaming level, timed, its streaming awaited and its tokens compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dejavu.clock import Clock
from dejavu.control.plan import Plan
from dejavu.engine import messages as m
from dejavu.errors import DejavuError
from dejavu.ids import RequestId
from dejavu.kv.levels import StreamingLevel
from dejavu.report.spans import Span
from dejavu.report.streaming_times import StreamingTimes, times_of
from dejavu.request import Completion, Request
from dejavu.serving.controller import Controller
from dejavu.workflows.generate import collect
from dejavu.workflows.running import RunningCluster

_LOOK_S = 0.05
_SHOW_INTERVAL_S = 0.25

Answers = Mapping[RequestId, tuple[int, ...]]
"""Tokens by request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A batch and what it took."""

    latency_s: float
    answers: Answers
    times: StreamingTimes
    spans: Mapping[str, Sequence[Span]]
    """Of this batch, by worker."""


class Bench:
    """Serves batches one at a time on a cluster that is up.

    Args:
        told: called now and then, on the calling thread, with the share of the batch's tokens that have come.
    """

    def __init__(self, cluster: RunningCluster, plan: Plan, clock: Clock, told: Callable[[float], None]) -> None:
        self._cluster = cluster
        self._plan = plan
        self._clock = clock
        self._observer = _Observer(told)
        self._controller = Controller(cluster.links, None, self._observer, cluster)

    def serve(self, level: str, requests: Sequence[Request]) -> Served:
        """The batch was served at that level, and all that it had to stream has left its workers.

        Raises DejavuError when a request failed or was computed twice, or streaming does not end.
        """
        self._cluster.links.every_worker(m.SetStreaming(epoch=self._plan.epoch, level=StreamingLevel(level)))
        self._observer.begin(requests)
        start_s = self._clock.now()
        latency_s = self._controller.serve(requests)
        answers = self._observer.answers(level)
        spans = self._settled(level, start_s)
        everything = [span for own in spans.values() for span in own]
        return Served(
            latency_s=latency_s,
            answers=answers,
            times=times_of(everything, start_s, self._clock.now()),
            spans=spans,
        )

    def _settled(self, level: str, start_s: float) -> dict[str, list[Span]]:
        """The workers' spans since ``start_s``. Until each job has left, its time is not known, and it would disturb
        the next batch."""
        deadline_s = self._clock.monotonic() + self._plan.timeout_s
        num_before = -1
        while True:
            _, spans = collect(self._cluster)
            own = {name: [span for span in those if span.start_s >= start_s] for name, those in spans.items()}
            num_begun, num_ended = _count(own, "stream_out"), _count(own, "flush")
            # Seen twice: a job that waits to be begun shows in neither number.
            if num_begun == num_ended == num_before:
                return own
            num_before = num_ended
            if self._clock.monotonic() > deadline_s:
                raise DejavuError(
                    f"streaming at level {level}: {num_begun - num_ended} of {num_begun} transfers had not left "
                    f"{self._plan.timeout_s:g} s after the last token; the workers' logs say why"
                )
            self._clock.sleep(_LOOK_S)


class _Observer:
    """Keeps the completions of one batch."""

    def __init__(self, told: Callable[[float], None]) -> None:
        self._told = told
        self._completions: dict[RequestId, Completion] = {}
        self._num_tokens = 0
        self._num_expected = 1
        self._shown_s = 0.0

    def begin(self, requests: Sequence[Request]) -> None:
        """A new batch comes."""
        self._completions, self._num_tokens, self._shown_s = {}, 0, 0.0
        self._num_expected = sum(request.max_tokens for request in requests)

    def token(self, request_id: RequestId, at_s: float) -> None:
        """One more token has come."""
        self._num_tokens += 1
        # Not at every token: the cores are the workers'.
        if at_s - self._shown_s > _SHOW_INTERVAL_S:
            self._shown_s = at_s
            self._told(self._num_tokens / self._num_expected)

    def ended(self, completion: Completion, token_times_s: Sequence[float]) -> None:
        """The request is over."""
        self._completions[completion.id] = completion

    def answers(self, level: str) -> Answers:
        """Every request's tokens. Raises DejavuError when one failed, or was begun again and so took longer."""
        for completion in self._completions.values():
            if completion.finish_reason != "length":
                reason = completion.error or completion.finish_reason
                raise DejavuError(f"streaming at level {level}: request {completion.id} failed: {reason}")
        if self._num_tokens != self._num_expected:
            raise DejavuError(
                f"streaming at level {level}: {self._num_tokens} tokens came where {self._num_expected} are asked for: "
                "a request was computed again; run.log says why"
            )
        return {completion.id: completion.tokens for completion in self._completions.values()}


def _count(spans: Mapping[str, Sequence[Span]], name: str) -> int:
    return sum(span.name == name for own in spans.values() for span in own)


def check_same(model: str, level: str, expected: Answers, got: Answers) -> None:
    """Streaming has changed no token of ``expected``, which came with level off.

    Raises DejavuError naming model, level, request and the first position that differs.
    """
    for request_id, tokens in expected.items():
        if got[request_id] == tokens:
            continue
        pairs = zip(tokens, got[request_id], strict=False)
        position = next((at for at, (one, other) in enumerate(pairs) if one != other), len(got[request_id]))
        raise DejavuError(
            f"{model}, streaming at level {level}: request {request_id} differs from level off from its new token "
            f"{position} on; streaming must never change an answer"
        )
