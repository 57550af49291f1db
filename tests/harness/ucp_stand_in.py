"""A stand-in for UCX-Py's package ``ucp``: the calls that ``ucp_worker`` makes, over memory."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest


class StandInError(Exception):
    """Takes the place of UCXBaseException."""


class _Endpoint:
    """Sends copy at once; receives wait. Both sides share a lock, as each has its own loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.lock = threading.Lock()
        self.peer: _Endpoint | None = None
        self.is_closed = False
        self.arrived: dict[int, deque[bytes]] = defaultdict(deque)
        self.waiting: dict[int, deque[tuple[Any, asyncio.Future[None]]]] = defaultdict(deque)
        self.close_callback: Callable[[], None] | None = None

    async def send(self, buffer: Any, tag: int) -> None:
        assert self.peer is not None
        with self.lock:
            if self.is_closed:
                raise StandInError("closed")
            self.peer.arrived[tag].append(bytes(buffer))
            self.peer.match(tag)

    async def recv(self, buffer: Any, tag: int) -> None:
        future = self.loop.create_future()
        with self.lock:
            if self.is_closed:
                raise StandInError("closed")
            self.waiting[tag].append((buffer, future))
            self.match(tag)
        await future

    def match(self, tag: int) -> None:
        while self.arrived[tag] and self.waiting[tag]:
            data = self.arrived[tag].popleft()
            buffer, future = self.waiting[tag].popleft()
            buffer[: len(data)] = np.frombuffer(data, np.uint8)
            self.loop.call_soon_threadsafe(_resolve, future, None)

    def closed(self) -> bool:
        return self.is_closed

    def set_close_callback(self, callback: Callable[[], None]) -> None:
        self.close_callback = callback

    def abort(self) -> None:
        with self.lock:
            sides = [side for side in (self, self.peer) if side is not None and not side.is_closed]
            for side in sides:
                side.is_closed = True
                for _, future in itertools.chain(*side.waiting.values()):
                    _threadsafe(side.loop, _resolve, future, StandInError("connection reset"))
                if side is not self and side.close_callback is not None:
                    _threadsafe(side.loop, side.close_callback)


class _Listener:
    def __init__(
        self, ports: dict[int, _Listener], port: int, accepted: Callable[[_Endpoint], Awaitable[None]]
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.ports = ports
        self.port = port
        self.accepted = accepted
        ports[port] = self

    def close(self) -> None:
        self.ports.pop(self.port, None)

    async def pair(self, theirs: _Endpoint) -> None:
        ours = _Endpoint()
        ours.lock, ours.peer, theirs.peer = theirs.lock, theirs, ours
        await self.accepted(ours)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """``import ucp`` finds the stand-in."""
    ports: dict[int, _Listener] = {}
    free_ports = itertools.count(50000)

    def create_listener(callback: Any, port: int = 0, endpoint_error_handling: bool = False) -> _Listener:
        assert endpoint_error_handling
        bound = port or next(free_ports)
        if bound in ports:
            raise StandInError("address in use")
        return _Listener(ports, bound, callback)

    async def create_endpoint(host: str, port: int, endpoint_error_handling: bool = False) -> _Endpoint:
        assert endpoint_error_handling
        if port not in ports:
            raise StandInError("connection refused")
        endpoint = _Endpoint()
        listener = ports[port]
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(listener.pair(endpoint), listener.loop))
        return endpoint

    package, exceptions = ModuleType("ucp"), ModuleType("ucp.exceptions")
    package.__dict__.update(create_listener=create_listener, create_endpoint=create_endpoint, exceptions=exceptions)
    exceptions.__dict__.update(UCXBaseException=StandInError)
    monkeypatch.setitem(sys.modules, "ucp", package)
    monkeypatch.setitem(sys.modules, "ucp.exceptions", exceptions)
    monkeypatch.delitem(sys.modules, "dejavu.transport.ucp_worker", raising=False)


def _resolve(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _threadsafe(loop: asyncio.AbstractEventLoop, job: Callable[..., None], *arguments: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(job, *arguments)
