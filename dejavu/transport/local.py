"""The transport inside one process: the same protocol over memory, for tests and for runs without a network."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import numpy as np

from dejavu.transport.base import Buffer
from dejavu.transport.core import Cancel, CoreEndpoint, CoreError, Done, Job, Result
from dejavu.transport.credits import CreditLimit
from dejavu.transport.engine import DEFAULT_CREDITS, LinkTransport
from dejavu.transport.job_loop import JobLoop

_FIRST_PORT = 40000
_GONE = "the connection was aborted"


class LocalNetwork:
    """The ports of one imagined host; transports that share it can reach each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[int, Callable[[LocalEndpoint], None]] = {}
        self._free_ports = itertools.count(_FIRST_PORT)

    def bind(self, port: int, connected: Callable[[LocalEndpoint], None]) -> int:
        """Who connects to the port (any free one for 0) goes to ``connected``. Raises CoreError when it is taken."""
        with self._lock:
            bound = port or next(free for free in self._free_ports if free not in self._listeners)
            if bound in self._listeners:
                raise CoreError(f"port {bound} is taken")
            self._listeners[bound] = connected
            return bound

    def unbind(self, port: int) -> None:
        """The port is free."""
        with self._lock:
            self._listeners.pop(port, None)

    def listener(self, port: int) -> Callable[[LocalEndpoint], None] | None:
        """Who listens there."""
        with self._lock:
            return self._listeners.get(port)


class LocalEndpoint:
    """One side of a connection. A transfer is one copy, made when both its sides are there."""

    def __init__(self, core: LocalCore, port: int | None) -> None:
        self._core = core
        self._port = port
        self._peer: LocalEndpoint | None = None
        self._lock = threading.Lock()
        self._aborted = False
        self._closed: Callable[[str], None] = lambda reason: None
        self._sent: dict[int, list[tuple[Buffer, Done]]] = {}
        self._wanted: dict[int, list[tuple[Buffer, Done]]] = {}

    @property
    def description(self) -> str:
        """See ``CoreEndpoint.description``."""
        return "local memory"

    def open(self, opened: Done, closed: Callable[[str], None]) -> None:
        """See ``CoreEndpoint.open``."""
        self._closed = closed
        failure = self._connect() if self._port is not None else None
        self._core.submit(lambda: opened(failure))

    def accepted_by(self, core: LocalCore) -> LocalEndpoint:
        """The other side of this connection, which belongs to ``core``."""
        other = LocalEndpoint(core, None)
        other._lock = self._lock  # One lock for both sides: an abort then waits for a copy that is being made.
        other._peer = self
        self._peer = other
        return other

    def send(self, tag: int, buffer: Buffer, done: Done) -> None:
        """See ``CoreEndpoint.send``."""
        with self._lock:
            if self._aborted or self._peer is None or self._peer._aborted:
                self._tell(done, CoreError(_GONE))
                return
            self._peer._sent.setdefault(tag, []).append((buffer, done))
            self._peer._match(tag)

    def recv(self, tag: int, buffer: Buffer, done: Done) -> None:
        """See ``CoreEndpoint.recv``."""
        with self._lock:
            if self._aborted or self._peer is None or self._peer._aborted:
                self._tell(done, CoreError(_GONE))
                return
            self._wanted.setdefault(tag, []).append((buffer, done))
            self._match(tag)

    def abort(self) -> None:
        """See ``CoreEndpoint.abort``."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            self._drop_all()
            peer = self._peer
            if peer is not None and not peer._aborted:
                peer._drop_all()
                peer._core.submit(lambda: peer._closed("the peer has closed the connection"))

    def _connect(self) -> CoreError | None:
        assert self._port is not None, "only the connecting side has a port to go to"
        connected = self._core.network.listener(self._port)
        if connected is None:
            return CoreError(f"connection refused: nobody listens at port {self._port}")
        connected(self)
        return None

    def _match(self, tag: int) -> None:
        while self._sent.get(tag) and self._wanted.get(tag):
            source, sent = self._sent[tag].pop(0)
            target, received = self._wanted[tag].pop(0)
            failure = None
            if source.nbytes > target.nbytes:
                failure = CoreError(f"{source.nbytes} bytes sent into a buffer of {target.nbytes}")
            else:
                np.copyto(np.frombuffer(target, np.uint8)[: source.nbytes], np.frombuffer(source, np.uint8))
            self._tell(received, failure)
            assert self._peer is not None, "a match has two sides"
            self._peer._tell(sent, failure)
        for waiting in (self._sent, self._wanted):
            if not waiting.get(tag):
                waiting.pop(tag, None)

    def _drop_all(self) -> None:
        failure = CoreError(_GONE)
        for _, done in itertools.chain(*self._wanted.values()):
            self._tell(done, failure)
        for _, done in itertools.chain(*self._sent.values()):
            if self._peer is not None:
                self._peer._tell(done, failure)
        self._wanted.clear()
        self._sent.clear()

    def _tell(self, done: Done, failure: CoreError | None) -> None:
        self._core.submit(lambda: done(failure))


class LocalCore:
    """A thread of its own on a ``LocalNetwork``."""

    name = "local"

    def __init__(self, network: LocalNetwork) -> None:
        self.network = network
        self._port: int | None = None
        self._loop = JobLoop("local-transport")
        self._loop.start()

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
        """See ``Core.endpoint``; every host is this process."""
        return LocalEndpoint(self, port)

    def listen(self, port: int, accepted: Callable[[CoreEndpoint], None]) -> int:
        """See ``Core.listen``."""

        def connected(theirs: LocalEndpoint) -> None:
            ours = theirs.accepted_by(self)
            self.submit(lambda: accepted(ours))

        self._port = self.network.bind(port, connected)
        return self._port

    def stop(self) -> None:
        """See ``Core.stop``."""
        if self._port is not None:
            self.network.unbind(self._port)
            self._port = None
        self._loop.stop()


class LocalTransport(LinkTransport):
    """A ``Transport`` between threads of this process."""

    def __init__(
        self,
        network: LocalNetwork,
        secret: str,
        *,
        credit_limit: CreditLimit = DEFAULT_CREDITS,
        handshake_timeout_s: float = 5.0,
    ) -> None:
        super().__init__(LocalCore(network), secret, credit_limit=credit_limit, handshake_timeout_s=handshake_timeout_s)
