"""A service on a thread of its own, so that signals and the HTTP server have theirs."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from types import TracebackType

from dejavu.serving.service import Service

_END_WAIT_S = 1.0
"""From the service's own end to that of its thread."""


class ServiceThread:
    """The service runs while the ``with`` block does; at its end everything open is aborted."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._done: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)

    def __enter__(self) -> ServiceThread:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.service.drain(0.0)

    def wait(self) -> None:
        """The service has ended. Raises what ended it, or KeyboardInterrupt when this thread is interrupted."""
        self._done.result()

    def failure(self) -> BaseException | None:
        """What ended the service; None when nothing did but its drain, or when it has not ended."""
        wait([self._done], _END_WAIT_S)
        return self._done.exception() if self._done.done() else None

    def _run(self) -> None:
        try:
            self.service.run()
        # It is raised on the thread that waits.
        except BaseException as error:
            self._done.set_exception(error)
        else:
            self._done.set_result(None)
