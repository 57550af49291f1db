"""A service over an in-process cluster, and listeners who keep what they hear."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dejavu.clock import SystemClock
from dejavu.request import Completion, TokenLogprobs
from dejavu.serving.controller import Controller
from dejavu.serving.service import Service

DEADLINE_S = 60.0


class Heard:
    """A listener that checks that everything comes once and in order.

    Args:
        act: called at each moment: ``started``, then 1 for the first token, 2 for the second, ...
    """

    def __init__(self, act: Callable[[object], None] = lambda moment: None) -> None:
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.line: Completion | None = None
        self.is_over = threading.Event()
        self._act = act

    def started(self) -> None:
        assert not self.tokens
        assert self.line is None
        self._act("started")

    def token(self, token: int, text: str, start: int, logprobs: TokenLogprobs | None) -> None:
        assert self.line is None, "a token after the end"
        self.tokens.append(token)
        self.texts.append(text)
        self.logprobs.append(logprobs)
        self._act(len(self.tokens))

    def ended(self, completion: Completion, rest: str, num_cut: int) -> None:
        assert self.line is None, "ended twice"
        self.line = completion
        assert tuple(self.tokens) == completion.tokens
        assert "".join([*self.texts, rest]) == completion.text
        self.is_over.set()

    def wait(self) -> Completion:
        """The final line."""
        assert self.is_over.wait(DEADLINE_S), "no end"
        assert self.line is not None
        return self.line


@contextmanager
def running_service(
    controller: Controller, *, max_queue: int = 1000, request_timeout_s: float | None = None
) -> Iterator[Service]:
    """A service that runs on a thread; at the end it is drained."""
    service = Service(controller, SystemClock(), max_queue=max_queue, request_timeout_s=request_timeout_s)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            service.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="service")
    thread.start()
    try:
        yield service
        assert service.drain(DEADLINE_S) or failures
    finally:
        service.drain(0.0)
        thread.join(DEADLINE_S)
    if failures:
        raise failures[0]
