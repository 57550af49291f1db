"""The UCX-Py core, for machines that have ``ucp`` (UCX-Py 0.45, no longer published) instead of ``ucxx``.

Written from UCX-Py's documented interface. This module has been run against a stand-in for ``ucp`` only: its package
can no longer be installed, so take the first run on a machine that has it as a test. UCX-Py swaps tags
itself and keeps one worker for the whole process, which it drives from an asyncio loop; here that loop has a thread
of its own. Import it after ``ucx_environment.tune_environment``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np
import ucp
from ucp.exceptions import UCXBaseException

from dejavu.transport.base import Buffer
from dejavu.transport.core import Cancel, CoreEndpoint, CoreError, Done, Job, Result

_STOP_TIMEOUT_S = 10.0


class UcpEndpoint:
    """An endpoint with error handling on. ``ucp_endpoint`` is None on the side that has yet to connect."""

    def __init__(self, core: UcpCore, ucp_endpoint: Any, host: str = "", port: int = 0) -> None:
        self._core = core
        self._ucp = ucp_endpoint
        self._host = host
        self._port = port
        self._aborted = False
        self._closed: Callable[[str], None] = _ignore

    @property
    def description(self) -> str:
        """``ucx``; UCX-Py does not say which lanes it has (UCX_LOG_LEVEL=info prints them)."""
        return "ucx (through UCX-Py; UCX_LOG_LEVEL=info names the interface)"

    def open(self, opened: Done, closed: Callable[[str], None]) -> None:
        """See ``CoreEndpoint.open``."""
        self._closed = closed
        self._core.run(self._open(), opened)

    def send(self, tag: int, buffer: Buffer, done: Done) -> None:
        """See ``CoreEndpoint.send``."""
        self._core.run(self._transfer("send", tag, buffer), done)

    def recv(self, tag: int, buffer: Buffer, done: Done) -> None:
        """See ``CoreEndpoint.recv``."""
        self._core.run(self._transfer("recv", tag, buffer), done)

    def abort(self) -> None:
        """See ``CoreEndpoint.abort``."""
        self._aborted = True
        self._closed = _ignore
        ended, self._ucp = self._ucp, None
        if ended is not None:
            ended.abort()

    async def _open(self) -> None:
        if self._ucp is None:
            connected = await ucp.create_endpoint(self._host, self._port, endpoint_error_handling=True)
            if self._aborted:
                connected.abort()
                raise CoreError("the connection was aborted")
            self._ucp = connected
        self._ucp.set_close_callback(lambda: self._core.submit(self._ended))

    async def _transfer(self, kind: str, tag: int, buffer: Buffer) -> None:
        endpoint = self._ucp
        if endpoint is None or endpoint.closed():
            raise CoreError("the connection is closed")
        await getattr(endpoint, kind)(np.frombuffer(buffer, dtype=np.uint8), tag=tag)
        # UCX-Py swallows a cancellation, so a transfer that ends with the endpoint has not taken place.
        if self._aborted or endpoint.closed():
            raise CoreError("the connection was closed during a transfer")

    def _ended(self) -> None:
        self._closed("the connection is closed")


class UcpCore:
    """UCX-Py on an asyncio loop with its own thread."""

    name = "ucp"

    def __init__(self) -> None:
        self._listener: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ucx", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> bool:
        """See ``Core.submit``."""
        try:
            self._loop.call_soon_threadsafe(job)
        except RuntimeError:
            return False  # asyncio's way to say that the loop is closed.
        return True

    def call(self, job: Callable[[], Result], timeout_s: float) -> Result:
        """See ``Core.call``."""
        if self.on_own_thread():
            return job()
        future: Future[Result] = Future()

        async def run() -> None:
            try:
                future.set_result(job())
            except Exception as error:  # Whatever the job raises belongs to the thread that waits for it.
                future.set_exception(error)

        asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result(timeout_s)
        except FutureTimeout as error:  # Not the built-in class before Python 3.11.
            raise TimeoutError(f"the transport's thread did not answer within {timeout_s} s") from error

    def later(self, delay_s: float, job: Job) -> Cancel:
        """See ``Core.later``."""
        return self._loop.call_later(delay_s, job).cancel

    def on_own_thread(self) -> bool:
        """See ``Core.on_own_thread``."""
        return threading.current_thread() is self._thread

    def endpoint(self, host: str, port: int) -> CoreEndpoint:
        """See ``Core.endpoint``."""
        return UcpEndpoint(self, None, host, port)

    def listen(self, port: int, accepted: Callable[[CoreEndpoint], None]) -> int:
        """See ``Core.listen``; UCX binds every interface."""

        async def connected(ucp_endpoint: Any) -> None:
            accepted(UcpEndpoint(self, ucp_endpoint))

        try:
            self._listener = ucp.create_listener(connected, port, endpoint_error_handling=True)
        except UCXBaseException as error:
            raise _core_error(error) from error
        return int(self._listener.port)

    def stop(self) -> None:
        """See ``Core.stop``."""
        if self._loop.is_closed():
            return
        self.call(self._shut, _STOP_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, None], done: Done) -> None:
        """The coroutine runs, in the order of these calls; ``done`` hears how it ended."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._finished(ended, done))

    def _finished(self, task: asyncio.Task[None], done: Done) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            done(CoreError("cancelled"))
            return
        error = task.exception()
        if error is None or isinstance(error, CoreError):
            done(error)
        else:
            done(_core_error(error))

    def _shut(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for task in tuple(self._tasks):
            task.cancel()


def _core_error(error: BaseException) -> CoreError:
    return CoreError(f"{type(error).__name__}: {error}".rstrip(": "))


def _ignore(_: str) -> None:
    """Nobody needs to know."""
