"""The UCXX core: one thread owns the UCX worker and sleeps in epoll. The only module that touches ``ucxx``.

UCXX's own progress modes spin a core while a receive waits, which takes it from the computation beside it; this way
idle costs nothing. The names used here are UCXX's private ones, of version 0.52. Import it after
``ucx_environment.tune_environment``.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ucxx._lib.libucxx as libucxx
from ucxx._lib.arr import Array
from ucxx.exceptions import UCXError

from dejavu.transport.base import Buffer
from dejavu.transport.core import Cancel, CoreEndpoint, CoreError, Done, Job, Result
from dejavu.transport.descriptor_limit import require_descriptors
from dejavu.transport.job_loop import JobLoop
from dejavu.transport.ucx_lanes import endpoint_lanes

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 30.0
_DRAIN_TIMEOUT_S = 5.0
_TAG_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Operation:
    """A request under way. UCXX cancels a request whose object is dropped, and the array pins the buffer."""

    request: Any
    array: Any
    done: Done
    endpoint: UcxxEndpoint


class UcxxEndpoint:
    """An endpoint with error handling on, so that a peer's death ends it; that excludes shared memory."""

    def __init__(self, core: UcxxCore, create: Callable[[], Any]) -> None:
        self._core = core
        self._create: Callable[[], Any] | None = create
        self._ucx: Any = None
        self._closed: Callable[[str], None] = _ignore
        self._aborted = False
        self._receive_space = core.new_tag_space()
        self._send_space = 0
        self._lanes: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """``ucx`` and the lanes that UCX chose, e.g. ``ucx tcp/lo``."""
        if self._lanes:
            return "ucx " + " ".join(self._lanes)
        return f"ucx (lanes unknown, UCX_TLS={os.environ.get('UCX_TLS', 'all')})"

    def open(self, opened: Done, closed: Callable[[str], None]) -> None:
        """Connects, and swaps tag spaces over the stream: tags are matched per worker, so each side names its own."""
        assert self._create is not None, "an endpoint is opened once"
        # Forgotten once used: it refers to the listener, whose port is free when nothing does.
        create, self._create = self._create, None
        self._closed = closed
        try:
            require_descriptors()
            self._ucx = create()
        except (UCXError, CoreError) as error:
            failure = error if isinstance(error, CoreError) else _core_error(error)
            self._core.submit(lambda: opened(failure))
            return
        self._ucx.set_close_callback(self._core.submit, (self._ended,))
        theirs = bytearray(8)

        def swapped(failure: CoreError | None) -> None:
            self._send_space = int.from_bytes(theirs, "little")
            if failure is None:
                self._lanes = endpoint_lanes(self._ucx.handle)
            opened(failure)

        ours = self._receive_space.to_bytes(8, "little")
        self._post("stream_send", memoryview(ours), _ignore)
        self._post("stream_recv", memoryview(theirs), swapped)

    def send(self, tag: int, buffer: Buffer, done: Done) -> None:
        """The bytes go to the peer's space under this tag; zero-copy for all but small buffers."""
        self._post("tag_send", buffer, done, libucxx.UCXXTag(self._send_space | tag))

    def recv(self, tag: int, buffer: Buffer, done: Done) -> None:
        """Posted on the endpoint, not on the worker: so the peer's death fails it."""
        self._post("tag_recv", buffer, done, libucxx.UCXXTag(self._receive_space | tag))

    def abort(self) -> None:
        """The endpoint is closed by force and its requests have ended."""
        if self._aborted:
            return
        self._aborted = True
        self._create = None
        self._closed = _ignore
        self._core.release_tag_space(self._receive_space)
        if self._ucx is not None:
            self._ucx.close_blocking(period=int(_DRAIN_TIMEOUT_S * 1e9), max_attempts=1)
            self._core.drain(self)
            self._ucx.remove_close_callback()
            self._ucx = None

    def _post(self, kind: str, buffer: Buffer, done: Done, *tag: Any) -> None:
        if self._ucx is None:
            self._core.submit(lambda: done(CoreError("the connection was aborted")))
            return
        array = Array(np.frombuffer(buffer, dtype=np.uint8))
        try:
            request = getattr(self._ucx, kind)(array, *tag)
        except UCXError as error:
            failure = _core_error(error)
            self._core.submit(lambda: done(failure))
            return
        self._core.watch(_Operation(request=request, array=array, done=done, endpoint=self))

    def reason(self) -> CoreError | None:
        """What ended the endpoint, if it has ended: it says more than the requests that this cancels."""
        try:
            if self._ucx is not None:
                self._ucx.raise_on_error()
        except UCXError as error:
            return _core_error(error)
        return None

    def _ended(self) -> None:
        self._closed(str(self.reason() or "the connection is closed"))


class UcxxCore:
    """A UCX context and worker on a thread of their own."""

    name = "ucxx"

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self._spaces: set[int] = set()
        self._listener: Any = None
        self._worker: Any = None
        self._loop = JobLoop("ucx")
        self._loop.start()
        self._loop.call(self._open, _START_TIMEOUT_S)

    def submit(self, job: Job) -> bool:
        """See ``Core.submit``."""
        return self._loop.submit(job)

    def call(self, job: Callable[[], Result], timeout_s: float) -> Result:
        """See ``Core.call``."""
        return self._loop.call(job, timeout_s)

    def later(self, delay_s: float, job: Job) -> Cancel:
        """See ``Core.later``."""
        return self._loop.later(delay_s, job)

    def on_own_thread(self) -> bool:
        """See ``Core.on_own_thread``."""
        return self._loop.on_own_thread()

    def endpoint(self, host: str, port: int) -> CoreEndpoint:
        """See ``Core.endpoint``; ``host`` is an IP address."""
        return UcxxEndpoint(self, lambda: libucxx.UCXEndpoint.create(self._worker, host, port, True))

    def listen(self, port: int, accepted: Callable[[CoreEndpoint], None]) -> int:
        """See ``Core.listen``; UCX binds every interface."""

        def connected(request: int) -> None:
            # Inside a UCX callback nothing may be progressed, so the rest waits for the loop.
            self.submit(lambda: self._accept(request, accepted))

        try:
            self._listener = libucxx.UCXListener.create(worker=self._worker, port=port, cb_func=connected)
        except UCXError as error:
            raise _core_error(error) from error
        return int(self._listener.port)

    def stop(self) -> None:
        """See ``Core.stop``."""
        try:
            self._loop.call(self._shut, _START_TIMEOUT_S)
        finally:
            self._loop.stop()

    def watch(self, operation: _Operation) -> None:
        """The operation's ``done`` is called when it has completed."""
        self._operations.append(operation)

    def new_tag_space(self) -> int:
        """The upper half of this worker's tags for one connection; random, so that strangers cannot guess it."""
        while (space := secrets.randbits(_TAG_BITS) << _TAG_BITS) in self._spaces:
            pass
        self._spaces.add(space)
        return space

    def release_tag_space(self, space: int) -> None:
        """The tags may be given to another connection."""
        self._spaces.discard(space)

    def drain(self, endpoint: UcxxEndpoint) -> None:
        """No operation of the closed endpoint is under way."""
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        while any(operation.endpoint is endpoint and not operation.request.completed for operation in self._operations):
            self._worker.progress()
            if time.monotonic() > deadline:
                logger.error("UCX still holds buffers of a closed endpoint; they stay allocated until it lets go")
                return

    def fileno(self) -> int:
        """See ``Poller.fileno``."""
        return int(self._worker.epoll_file_descriptor)

    def poll(self) -> bool:
        """See ``Poller.poll``."""
        self._worker.progress()
        completed: list[_Operation] = []
        pending: list[_Operation] = []
        for operation in self._operations:
            (completed if operation.request.completed else pending).append(operation)
        if not completed:
            return False
        self._operations = pending
        for operation in completed:
            operation.done(_outcome(operation))
        return True

    def arm(self) -> bool:
        """See ``Poller.arm``."""
        return bool(self._worker.arm())

    def _open(self) -> None:
        features = (libucxx.Feature.TAG, libucxx.Feature.STREAM, libucxx.Feature.WAKEUP)
        context = libucxx.UCXContext(feature_flags=features)
        self._worker = libucxx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
        self._worker.init_blocking_progress_mode()
        self._loop.drive(self)

    def _accept(self, request: int, accepted: Callable[[CoreEndpoint], None]) -> None:
        listener = self._listener
        if listener is not None:
            accepted(UcxxEndpoint(self, lambda: listener.create_endpoint_from_conn_request(request, True)))

    def _shut(self) -> None:
        if self._worker is None:
            return
        self._listener = None
        self._worker.cancel_inflight_requests()
        self._worker.progress()
        self._loop.drive(None)
        self._operations.clear()
        self._worker = None


def _outcome(operation: _Operation) -> CoreError | None:
    try:
        operation.request.check_error()
    except UCXError as error:
        return operation.endpoint.reason() or _core_error(error)
    return None


def _core_error(error: UCXError) -> CoreError:
    return CoreError(f"{type(error).__name__}: {error}".rstrip(": "))


def _ignore(_: object) -> None:
    """Nobody needs to know."""
