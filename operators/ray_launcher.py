"""Workers on the nodes of a Ray cluster that runs already: Ray says where, and each is the same process as anywhere."""

from __future__ import annotations

import importlib
import itertools
import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dejavu.errors import ConfigError
from dejavu.ids import WorkerName
from operators.ray_owner import WorkerOwner
from operators.roster import Entry, Roster

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
    """The actor that owns a worker's process, and the thread that follows it to its end."""

    actor: Any
    thread: threading.Thread | None = None


class RayLauncher(Roster[_Owned]):
    """A worker an actor, spread over the nodes; each takes ``num_threads`` CPUs, or a GPU and them.

    The actors are this process's: Ray ends them with it, and each worker ends with its actor. One that Ray has no room
    for waits for a place, and has no process until then.

    Args:
        spec_of: the JSON line that a worker reads at its start; its host is replaced by its node's address.
        log_folder: a file for each worker, on its node.
        num_threads: CPUs of a worker.
        num_gpus: GPUs of a worker.
        on_exit: called on a thread of this launcher as soon as a process has ended.
        address: of the Ray cluster; ``auto``: the one of this node, or the environment's RAY_ADDRESS.

    Raises ConfigError when Ray is not installed, no cluster answers there, or it is one of another version.
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
        super().__init__(log_folder, on_exit)
        self._ray = import_ray()
        self._spec_of = spec_of
        self._num_threads = num_threads
        self._unknown_pids = itertools.count(-1, -1)
        try:
            self._ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(f"cluster.ray_address={address}: no Ray cluster answers ({error})") from error
        except RuntimeError as error:
            # Ray's word for a cluster of another Ray or Python version.
            raise ConfigError(f"cluster.ray_address={address}: that cluster cannot be joined ({error})") from error
        self._actor = self._ray.remote(
            num_cpus=num_threads, num_gpus=num_gpus, max_concurrency=_CALLS_AT_ONCE, scheduling_strategy="SPREAD"
        )(WorkerOwner)

    def start(self, name: WorkerName) -> None:
        """A new process for the worker is starting where Ray has room, unless this launcher is stopping."""
        line = self._spec_of(name)
        entry = self._enter(name, lambda: (_Owned(self._actor.remote()), next(self._unknown_pids)))
        if entry is None:
            return
        entry.handle.thread = threading.Thread(target=self._follow, args=(entry, line), name=f"ray-{name}", daemon=True)
        entry.handle.thread.start()
        logger.info("worker %s is placed by Ray, its log on that node: %s", name, self.log_of(name))

    def kill(self, name: WorkerName) -> None:
        """The worker's newest process ends now, or is never started; its end is not among ``exits``."""
        entry = self._take_off(name)
        if entry is None:
            return
        logger.info("worker %s is killed", name)
        if entry.pid < 0:
            # A signal would wait for the actor to be placed, and come before the start.
            self._ray.kill(entry.handle.actor)
        else:
            entry.handle.actor.signal.remote(int(signal.SIGKILL))

    def signal(self, name: WorkerName, signum: int) -> None:
        """The worker's newest process gets the signal soon, if it runs."""
        if (entry := self._find(name, f"sent signal {signum}")) is not None:
            entry.handle.actor.signal.remote(signum)

    def tell(self, name: WorkerName, line: bytes) -> None:
        """The worker's newest process will read one more line on its standard input, if it runs."""
        if (entry := self._find(name, f"told {line!r}")) is not None:
            entry.handle.actor.tell.remote(line)

    def stop(self) -> None:
        """No process is left: asked by SIGTERM, killed with their actors after a grace. Idempotent."""
        self.expect_exits()
        left = [(entry, thread) for entry in self._all() if (thread := entry.handle.thread) and thread.is_alive()]
        for entry, _ in left:
            if entry.pid < 0:
                self._ray.kill(entry.handle.actor)
            else:
                entry.handle.actor.signal.remote(int(signal.SIGTERM))
        deadline_s = time.monotonic() + _STOP_GRACE_S
        for entry, thread in left:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
            if thread.is_alive():
                entry.handle.actor.signal.remote(int(signal.SIGKILL))
                thread.join(_STOP_GRACE_S)
        self._ray.shutdown()

    def _follow(self, entry: Entry[_Owned], line: bytes) -> None:
        """From the worker's start to its end, on a thread of its own."""
        status, actor = -int(signal.SIGKILL), entry.handle.actor
        try:
            # The actor's own node says where it is reached, once it has one.
            host = self._ray.get(actor.address.remote())
            if self._is_wanted(entry):
                log = str(self.log_of(entry.name))
                pid = self._ray.get(actor.start.remote(line, host, log, self._num_threads))
                if self._begun(entry, pid):
                    status = self._ray.get(actor.wait.remote())
        except self._ray.exceptions.RayTaskError as error:
            status = 1
            logger.warning("worker %s cannot be started on its node: %s", entry.name, error.cause)
        except self._ray.exceptions.RayError as error:
            if self._is_wanted(entry):
                reason = str(error).partition("\n")[0]
                logger.warning("worker %s: its node or its actor is gone: %s", entry.name, reason)
        finally:
            # It would keep its CPUs; with it ends a process that nobody wants any more.
            self._ray.kill(actor)
        self._ended(entry, status)
