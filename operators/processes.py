"""Worker processes that this launcher owns: started, watched, ended, none left behind."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from dejavu.ids import WorkerName
from dejavu.store import tether
from operators.observation import ProcessExit

logger = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-m", "dejavu.worker")
_STOP_GRACE_S = 5.0


_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "THP_MEM_ALLOC_ENABLE": "1"}
"""Weights and KV are read from end to end at every step: with huge pages a step takes up to a tenth less. What the
user has set stands; where the kernel or the C library knows nothing of it, nothing changes."""


class Launcher(Protocol):
    """Brings worker processes up, here or elsewhere."""

    def start(self, name: WorkerName) -> None:
        """A process for the worker is starting."""

    def running(self) -> frozenset[WorkerName]:
        """Workers whose process was started and has not ended."""

    def exits(self) -> tuple[ProcessExit, ...]:
        """Ends that nobody asked for."""

    def log_of(self, name: WorkerName) -> Path:
        """Where the worker logs."""

    def stop(self) -> None:
        """No process is left."""


class ProcessLauncher:
    """Workers as processes of this machine, one ``python -m dejavu.worker`` each.

    They get their spec through a pipe that stays open: its end tells a worker that its launcher is gone, and the
    kernel kills a worker whose launcher died. They do not get the terminal's Ctrl-C; the launcher ends them.

    Args:
        spec_of: the JSON line that a worker reads at its start.
        log_folder: a file for each worker.
        num_threads: for the numeric libraries of a worker, before torch is imported.
        on_exit: called on a thread of this launcher as soon as a process has ended.
        command: what a worker process runs; it reads its spec as a JSON line on standard input.
    """

    def __init__(
        self,
        spec_of: Callable[[WorkerName], bytes],
        log_folder: Path,
        *,
        num_threads: int,
        on_exit: Callable[[], None],
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self._spec_of = spec_of
        self._log_folder = log_folder
        self._num_threads = num_threads
        self._on_exit = on_exit
        self._command = tuple(command)
        self._lock = threading.Lock()
        self._processes: dict[WorkerName, subprocess.Popen[bytes]] = {}
        self._running: set[WorkerName] = set()
        self._exits: list[ProcessExit] = []
        self._is_stopping = False
        log_folder.mkdir(parents=True, exist_ok=True)

    def start(self, name: WorkerName) -> None:
        """A process for the worker is starting, unless this launcher is stopping.

        Call from a thread that lasts: the kernel ties the child to it.
        """
        environment = {
            **_HUGE_PAGES,
            **os.environ,
            "OMP_NUM_THREADS": str(self._num_threads),
            "TOKENIZERS_PARALLELISM": "false",
            "GRPC_VERBOSITY": "NONE",
        }
        with self._lock:
            if self._is_stopping:
                return
            with self.log_of(name).open("ab") as log:
                process = subprocess.Popen(
                    [*tether.command(os.getpid()), *self._command],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            self._processes[name] = process
            self._running.add(name)
        self._tell_spec(name, process)
        threading.Thread(target=self._wait, args=(name, process), name=f"wait-{name}", daemon=True).start()
        logger.info("worker %s starts as process %d, log %s", name, process.pid, self.log_of(name))

    def running(self) -> frozenset[WorkerName]:
        """Workers whose process was started and whose end is not among ``exits`` yet."""
        with self._lock:
            return frozenset(self._running)

    def exits(self) -> tuple[ProcessExit, ...]:
        """Ends that nobody asked for, oldest first."""
        with self._lock:
            return tuple(self._exits)

    def log_of(self, name: WorkerName) -> Path:
        """Where the worker logs."""
        return self._log_folder / f"{name}.log"

    def expect_exits(self) -> None:
        """From now on a process that ends is no failure."""
        with self._lock:
            self._is_stopping = True

    def stop(self) -> None:
        """No process is left: asked by SIGTERM, killed after a grace. Idempotent."""
        self.expect_exits()
        with self._lock:
            processes = dict(self._processes)
        for process in processes.values():
            if process.poll() is None:
                process.terminate()
        deadline_s = time.monotonic() + _STOP_GRACE_S
        for name, process in processes.items():
            try:
                process.wait(max(deadline_s - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                logger.warning("worker %s did not end in %g s and is killed", name, _STOP_GRACE_S)
                process.kill()
                process.wait()
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()

    def _tell_spec(self, name: WorkerName, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(self._spec_of(name) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            logger.error("worker %s ended before it read its spec", name)

    def _wait(self, name: WorkerName, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        with self._lock:
            self._running.discard(name)
            if self._is_stopping:
                return
            self._exits.append(ProcessExit(name=name, status=status))
        self._on_exit()
