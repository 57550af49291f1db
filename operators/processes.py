"""Worker processes of this machine: started, watched, ended, none left behind."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dejavu.ids import WorkerName
from dejavu.store import tether
from operators.roster import Entry, Roster
from operators.worker_process import WORKER_COMMAND, close_input, start_process, write_line

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 5.0


class ProcessLauncher(Roster[subprocess.Popen[bytes]]):
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
        super().__init__(log_folder, on_exit)
        self._spec_of = spec_of
        self._num_threads = num_threads
        self._command = tuple(command)
        log_folder.mkdir(parents=True, exist_ok=True)

    def start(self, name: WorkerName) -> None:
        """A new process for the worker is starting, unless this launcher is stopping.

        Call from a thread that lasts: the kernel ties the child to it. The process before it should have ended.
        """

        def make() -> tuple[subprocess.Popen[bytes], int]:
            command = [*tether.command(os.getpid()), *self._command]
            process = start_process(command, self.log_of(name), num_threads=self._num_threads)
            return process, process.pid

        entry = self._enter(name, make)
        if entry is None:
            return
        self._write(entry, self._spec_of(name))
        threading.Thread(target=self._wait, args=(entry,), name=f"wait-{name}", daemon=True).start()
        logger.info("worker %s starts as process %d, log %s", name, entry.pid, self.log_of(name))

    def kill(self, name: WorkerName) -> None:
        """The worker's newest process ends now, also one that is stopped; its end is not among ``exits``."""
        entry = self._take_off(name)
        if entry is not None:
            logger.info("worker %s is killed (process %d)", name, entry.pid)
            entry.handle.kill()

    def signal(self, name: WorkerName, signum: int) -> None:
        """The worker's newest process has got the signal, if it runs."""
        if (entry := self._find(name, f"sent signal {signum}")) is not None:
            entry.handle.send_signal(signum)

    def tell(self, name: WorkerName, line: bytes) -> None:
        """The worker's newest process will read one more line on its standard input, if it runs."""
        if (entry := self._find(name, f"told {line!r}")) is not None:
            self._write(entry, line)

    def stop(self) -> None:
        """No process is left: asked by SIGTERM, killed after a grace. Idempotent."""
        self.expect_exits()
        entries = self._all()
        for entry in entries:
            if entry.handle.poll() is None:
                entry.handle.terminate()
        deadline_s = time.monotonic() + _STOP_GRACE_S
        for entry in entries:
            try:
                entry.handle.wait(max(deadline_s - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                logger.warning("worker %s did not end in %g s and is killed", entry.name, _STOP_GRACE_S)
                entry.handle.kill()
                entry.handle.wait()
            close_input(entry.handle)

    def _write(self, entry: Entry[subprocess.Popen[bytes]], line: bytes) -> None:
        if not write_line(entry.handle, line):
            logger.error("worker %s ended before it read its line", entry.name)

    def _wait(self, entry: Entry[subprocess.Popen[bytes]]) -> None:
        status = entry.handle.wait()
        close_input(entry.handle)
        self._ended(entry, status)
