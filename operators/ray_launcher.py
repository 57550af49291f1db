"""Workers on the nodes of a Ray cluster that runs already: Ray says where, and each is the same process as anywhere."""

from __future__ import annotations

import importlib
import itertools
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejavu.errors import ConfigError
from dejavu.ids import WorkerName
from operators.observation import ProcessExit
from operators.ray_owner import WorkerOwner

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 5.0
_CALLS_AT_ONCE = 4
"""Of an owner: one of them waits for the end of its process."""


def import_ray() -> Any:
    """The module. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"cluster.launcher=ray needs Ray: pip install 'dejavu[ray]' ({error})") from error


@dataclass(slots=True)
class _Owned:
    """A worker's newest process, and the actor that owns it."""

    owner: Any
    thread: threading.Thread
    pid: int
    """Below 0 until the process has started."""
    is_killed: bool = False


class RayLauncher:
    """A worker an actor, spread over the nodes; each takes ``num_threads`` CPUs, or a GPU and them.

    The actors are this process's: Ray ends them with it, and each worker ends with its actor.

    Args:
        spec_of: the JSON line that a worker reads at its start; its host is replaced by its node's address.
        log_folder: a file for each worker, on its node.
        num_threads: CPUs of a worker.
        num_gpus: GPUs of a worker.
        on_exit: called on a thread of this launcher as soon as a process has ended.
        address: of the Ray cluster; ``auto``: the one of this node, or the environment's RAY_ADDRESS.

    Raises ConfigError when Ray is not installed or no cluster answers there.
    """

    def __init__(
        self,
        spec_of: Callable[[WorkerName], bytes],
        log_folder: Path,
        *,
        num_threads: int,
        num_gpus: int,
        on_exit: Callable[[], None],
        address: str,
    ) -> None:
        self._ray = import_ray()
        self._spec_of = spec_of
        self._log_folder = log_folder
        self._num_threads = num_threads
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._owned: dict[WorkerName, _Owned] = {}
        self._running: set[WorkerName] = set()
        self._exits: list[ProcessExit] = []
        self._is_stopping = False
        self._unknown_pids = itertools.count(-1, -1)
        try:
            self._ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(f"cluster.ray_address={address}: no Ray cluster answers ({error})") from error
        self._actor = self._ray.remote(
            num_cpus=num_threads, num_gpus=num_gpus, max_concurrency=_CALLS_AT_ONCE, scheduling_strategy="SPREAD"
        )(WorkerOwner)

    def start(self, name: WorkerName) -> None:
        """A new process for the worker is starting where Ray has room, unless this launcher is stopping."""
        line = self._spec_of(name)
        with self._lock:
            if self._is_stopping:
                return
            owner = self._actor.remote()
            thread = threading.Thread(target=self._follow, args=(name, owner, line), name=f"ray-{name}", daemon=True)
            self._owned[name] = _Owned(owner=owner, thread=thread, pid=next(self._unknown_pids))
            self._running.add(name)
        thread.start()
        logger.info("worker %s is placed by Ray, its log on that node: %s", name, self.log_of(name))

    def kill(self, name: WorkerName) -> None:
        """The worker's newest process ends now; its end is not among ``exits``."""
        with self._lock:
            if name not in self._running:
                return
            self._running.discard(name)
            owned = self._owned[name]
            owned.is_killed = True
        logger.info("worker %s is killed", name)
        owned.owner.signal.remote(int(signal.SIGKILL))

    def signal(self, name: WorkerName, signum: int) -> None:
        """The worker's newest process gets the signal soon, if it runs."""
        if (owned := self._running_one(name)) is not None:
            owned.owner.signal.remote(signum)

    def tell(self, name: WorkerName, line: bytes) -> None:
        """The worker's newest process will read one more line on its standard input, if it runs."""
        if (owned := self._running_one(name)) is not None:
            owned.owner.tell.remote(line)

    def pid_of(self, name: WorkerName) -> int | None:
        """The worker's newest process on its node; None for a worker that was not started here."""
        return self.pids().get(name)

    def pids(self) -> Mapping[WorkerName, int]:
        """The newest process of every worker that was started; below 0: it has not begun yet."""
        with self._lock:
            return {name: owned.pid for name, owned in self._owned.items()}

    def running(self) -> frozenset[WorkerName]:
        """Workers whose newest process was started and has not ended."""
        with self._lock:
            return frozenset(self._running)

    def exits(self) -> tuple[ProcessExit, ...]:
        """Ends that nobody asked for, oldest first."""
        with self._lock:
            return tuple(self._exits)

    def is_stopping(self) -> bool:
        """True once an end is no failure any more."""
        with self._lock:
            return self._is_stopping

    def expect_exits(self) -> None:
        """From now on a process that ends is no failure."""
        with self._lock:
            self._is_stopping = True

    def log_of(self, name: WorkerName) -> Path:
        """Where the worker logs, on its node."""
        return self._log_folder / f"{name}.log"

    def stop(self) -> None:
        """No process is left: asked by SIGTERM, killed with their actors after a grace. Idempotent."""
        self.expect_exits()
        with self._lock:
            owned, self._owned = list(self._owned.values()), {}
        for one in owned:
            one.owner.signal.remote(int(signal.SIGTERM))
        deadline_s = time.monotonic() + _STOP_GRACE_S
        for one in owned:
            one.thread.join(max(deadline_s - time.monotonic(), 0.0))
            if one.thread.is_alive():
                one.owner.signal.remote(int(signal.SIGKILL))
                one.thread.join(_STOP_GRACE_S)
        self._ray.shutdown()

    def _running_one(self, name: WorkerName) -> _Owned | None:
        with self._lock:
            owned = self._owned.get(name) if name in self._running else None
        if owned is None:
            logger.warning("worker %s has no process", name)
        return owned

    def _follow(self, name: WorkerName, owner: Any, line: bytes) -> None:
        """From the worker's start to its end, on a thread of its own."""
        status = -int(signal.SIGKILL)
        try:
            # The actor's own node says where it is reached.
            host = self._ray.get(owner.address.remote())
            pid = self._ray.get(owner.start.remote(line, host, str(self.log_of(name)), self._num_threads))
            with self._lock:
                if (mine := self._owned.get(name)) is not None and mine.owner is owner:
                    mine.pid = pid
            status = self._ray.get(owner.wait.remote())
            self._ray.kill(owner)
        except self._ray.exceptions.RayError as error:
            logger.warning("worker %s: its node or its actor is gone: %s", name, str(error).partition("\n")[0])
        self._ended(name, owner, status)

    def _ended(self, name: WorkerName, owner: Any, status: int) -> None:
        with self._lock:
            owned = self._owned.get(name)
            if owned is None or owned.owner is not owner:
                return
            self._running.discard(name)
            if self._is_stopping or owned.is_killed:
                return
            self._exits.append(ProcessExit(name=name, status=status, pid=owned.pid, at_s=time.time()))
        self._on_exit()
