"""A Ray whose actors are made up: placed, begun and ended by the test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    """Ray's base of errors."""


class RayTaskError(RayError):
    """A call that has raised on its node."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class MadeUpActor:
    """What a call gives is a future that the test fulfils; what it asks for is noted."""

    def __init__(self) -> None:
        self.address: Any = self._method("address")
        self.start: Any = self._method("start")
        self.wait: Any = self._method("wait")
        self.signal: Any = self._method("signal")
        self.futures: dict[str, Future[Any]] = {}
        self.called: dict[str, threading.Event] = {name: threading.Event() for name in ("address", "start", "wait")}
        self.signals: list[int] = []
        self.is_dead = threading.Event()
        self._lock = threading.Lock()

    def give(self, name: str, value: Any) -> None:
        """The call is answered, now or once it is made; an exception is raised where it is waited for."""
        future = self._future(name)
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)

    def die(self) -> None:
        """The actor is gone: no call is answered any more."""
        self.is_dead.set()
        for name in self.called:
            if not (future := self._future(name)).done():
                future.set_exception(RayError("the actor died"))

    def _future(self, name: str) -> Future[Any]:
        with self._lock:
            return self.futures.setdefault(name, Future())

    def _method(self, name: str) -> Any:
        def remote(*arguments: Any) -> Future[Any]:
            if name == "signal":
                self.signals.append(arguments[0])
                return Future()
            self.called[name].set()
            return self._future(name)

        return SimpleNamespace(remote=remote)


class MadeUpRay:
    """In the place of the module."""

    def __init__(self) -> None:
        self.actors: list[MadeUpActor] = []
        self.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
        self.on_init: Callable[[], None] = lambda: None

    def init(self, **_: Any) -> None:
        self.on_init()

    def remote(self, **_: Any) -> Callable[[type], Any]:
        return lambda _: SimpleNamespace(remote=self._make)

    def get(self, future: Future[Any]) -> Any:
        return future.result(60.0)

    def kill(self, actor: MadeUpActor) -> None:
        actor.die()

    def shutdown(self) -> None:
        pass

    def _make(self) -> MadeUpActor:
        self.actors.append(MadeUpActor())
        return self.actors[-1]
