"""Worker processes that this launcher owns: started, watched, ended, none left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
        """A new process for the worker is starting."""

    def kill(self, name: WorkerName) -> None:
        """The worker's newest process ends now; its end is not among ``exits``."""

    def signal(self, name: WorkerName, signum: int) -> None:
        """The worker's newest process has got the signal; what comes of it is seen like anything else."""

    def tell(self, name: WorkerName, line: bytes) -> None:
        """The worker's newest process will read one more line on its standard input."""

    def pid_of(self, name: WorkerName) -> int | None:
        """The worker's newest process, running or not."""

    def pids(self) -> Mapping[WorkerName, int]:
        """The newest process of every worker that was started."""

    def running(self) -> frozenset[WorkerName]:
        """Workers whose newest process was started and has not ended."""

    def exits(self) -> tuple[ProcessExit, ...]:
        """Ends that nobody asked for, oldest first."""

    def is_stopping(self) -> bool:
        """True when processes end because the run does."""

    def expect_exits(self) -> None:
        """From now on a process that ends is no failure."""

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
        self._replaced: list[subprocess.Popen[bytes]] = []
        """Processes of names that have a newer one; kept so that none is left behind."""
        self._running: dict[WorkerName, subprocess.Popen[bytes]] = {}
        self._killed: set[int] = set()
        self._exits: list[ProcessExit] = []
        self._is_stopping = False
        log_folder.mkdir(parents=True, exist_ok=True)

    def start(self, name: WorkerName) -> None:
        """A new process for the worker is starting, unless this launcher is stopping.

        Call from a thread that lasts: the kernel ties the child to it. The process before it should have ended.
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
            self._replaced = [process for process in self._replaced if process.poll() is None]
            if name in self._processes:
                self._replaced.append(self._processes[name])
            self._processes[name] = self._running[name] = process
        _write(name, process, self._spec_of(name))
        threading.Thread(target=self._wait, args=(name, process), name=f"wait-{name}", daemon=True).start()
        logger.info("worker %s starts as process %d, log %s", name, process.pid, self.log_of(name))

    def kill(self, name: WorkerName) -> None:
        """The worker's newest process ends now, also one that is stopped; its end is not among ``exits``."""
        with self._lock:
            process = self._running.pop(name, None)
            if process is None:
                return
            self._killed.add(process.pid)
        logger.info("worker %s is killed (process %d)", name, process.pid)
        process.kill()

    def signal(self, name: WorkerName, signum: int) -> None:
        """The worker's newest process has got the signal, if it runs."""
        with self._lock:
            process = self._running.get(name)
        if process is None:
            logger.warning("worker %s has no process to get signal %d", name, signum)
            return
        process.send_signal(signum)

    def tell(self, name: WorkerName, line: bytes) -> None:
        """The worker's newest process will read one more line on its standard input, if it runs."""
        with self._lock:
            process = self._running.get(name)
        if process is None:
            logger.warning("worker %s has no process to be told %r", name, line)
            return
        _write(name, process, line)

    def pid_of(self, name: WorkerName) -> int | None:
        """The worker's newest process, running or not; None for a worker that was not started here."""
        return self.pids().get(name)

    def pids(self) -> dict[WorkerName, int]:
        """The newest process of every worker that was started."""
        with self._lock:
            return {name: process.pid for name, process in self._processes.items()}

    def running(self) -> frozenset[WorkerName]:
        """Workers whose newest process was started, was not killed, and whose end is not among ``exits`` yet."""
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
            names = {process.pid: name for name, process in self._processes.items()}
            processes = [*self._replaced, *self._processes.values()]
        for process in processes:
            if process.poll() is None:
                process.terminate()
        deadline_s = time.monotonic() + _STOP_GRACE_S
        for process in processes:
            try:
                process.wait(max(deadline_s - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                name = names.get(process.pid, "of old")
                logger.warning("worker %s did not end in %g s and is killed", name, _STOP_GRACE_S)
                process.kill()
                process.wait()
            _close_input(process)

    def _wait(self, name: WorkerName, process: subprocess.Popen[bytes]) -> None:
        status, at_s = process.wait(), time.time()
        _close_input(process)
        with self._lock:
            if self._running.get(name) is process:
                del self._running[name]
            if self._is_stopping or process.pid in self._killed:
                self._killed.discard(process.pid)
                return
            self._exits.append(ProcessExit(name=name, status=status, pid=process.pid, at_s=at_s))
        self._on_exit()


def _write(name: WorkerName, process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None, "a worker is started with a pipe"
    try:
        process.stdin.write(line + b"\n")
        process.stdin.flush()
    except (BrokenPipeError, ValueError):
        logger.error("worker %s ended before it read its line", name)


def _close_input(process: subprocess.Popen[bytes]) -> None:
    """The pipe is closed; what a dead process has not read is lost."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
