"""Keys that live as long as this process does."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import dejavu
from dejavu.store.keeper_messages import (
    Cut,
    Held,
    Lost,
    Replaced,
    Start,
    ToSidecar,
    Trouble,
    Update,
    line_of,
    to_owner,
)
from dejavu.store.lease_calls import MAX_ENTRIES
from dejavu.store.spec import StoreSpec

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 2.0
_FIRST_BACK_OFF_S = 0.05
_LONGEST_BACK_OFF_S = 2.0
_SETTLED_S = 10.0


class LeaseKeeper:
    """Keeps ``entries`` in etcd on a lease for as long as this process lives and is not stopped.

    A sidecar process does it, so the lease outlasts a held GIL, slow loading and busy cores; it ends within
    milliseconds of this process's death, within ``ttl_s`` + 1 s of a SIGSTOP, and at ``close``. etcd's outages are
    survived: the keys come back by themselves, and ``losses`` tells that others may have seen them go.
    Raises ValueError when there are more entries than one transaction takes.

    ``guard`` is in every value of this process. With it, a key that was lost and is there again without it is left
    alone, for good: somebody has taken this process for dead and replaced it.
    """

    def __init__(self, spec: StoreSpec, ttl_s: float, entries: Mapping[str, bytes], *, guard: bytes = b"") -> None:
        self._spec = spec
        self._ttl_s = ttl_s
        self._guard = guard
        self._condition = threading.Condition()
        self._pipe_lock = threading.Lock()
        self._entries: dict[str, bytes] = {}
        self._dirty: set[str] = set()
        self._losses = 0
        self._holds = 0
        self._lease_id = 0
        self._closing = False
        self._process: subprocess.Popen[bytes] | None = None
        self._note(entries)
        self._reader = threading.Thread(target=self._supervise, name="lease-keeper", daemon=True)
        self._writer = threading.Thread(target=self._write, name="lease-updates", daemon=True)
        self._reader.start()
        self._writer.start()

    @property
    def losses(self) -> int:
        """How often the lease was lost, so that others may have taken this process for dead."""
        with self._condition:
            return self._losses

    @property
    def lease_id(self) -> int:
        """The lease that was held last, for writes of this process that must not outlive it; 0 before the first."""
        with self._condition:
            return self._lease_id

    def wait_held(self, timeout_s: float) -> bool:
        """True once the keys have been in etcd on the lease at least once; False when ``timeout_s`` passed before."""
        with self._condition:
            return self._condition.wait_for(lambda: self._holds > 0, timeout_s)

    def update(self, key: str, value: bytes) -> None:
        """The key will have the value, on the lease; values that are overtaken on the way are left out.

        Never waits for etcd. Raises ValueError when a new key is one too many for a transaction.
        """
        with self._condition:
            self._note({key: value})
            self._condition.notify_all()

    def cut(self, is_cut: bool) -> None:
        """While cut, nothing reaches etcd. For injected partitions. Any thread."""
        with self._condition:
            process = self._process
        with self._pipe_lock:
            if process is not None:
                _send(process, Cut(is_cut=is_cut))

    def close(self) -> None:
        """The keys are gone (when etcd could be reached within 2 s; else they run out) and so is the sidecar.

        Idempotent.
        """
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        with self._condition:
            self._closing = True
            process = self._process
            self._condition.notify_all()
        # The writer closes the pipe, which is what tells the sidecar to revoke.
        self._writer.join(max(0.0, deadline - time.monotonic()))
        if process is not None:
            try:
                process.wait(max(0.05, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        self._reader.join()
        self._writer.join()

    def _note(self, entries: Mapping[str, bytes]) -> None:
        if len(self._entries.keys() | entries.keys()) > MAX_ENTRIES:
            raise ValueError(f"a lease holds at most {MAX_ENTRIES} keys, so that they come back in one transaction")
        self._entries.update(entries)
        self._dirty.update(entries)

    def _supervise(self) -> None:
        """Starts the sidecar, listens to it, and starts it again when it dies, until ``close``."""
        back_off_s = _FIRST_BACK_OFF_S
        resumes = False
        while True:
            started_s = time.monotonic()
            try:
                process = self._spawn(resumes)
            except OSError as error:
                outcome = f"cannot be started ({error})"
            else:
                if process is None:
                    return
                resumes = self._listen(process) or resumes
                outcome = f"ended with status {process.wait()}"
                self._forget(process)
            if time.monotonic() - started_s > _SETTLED_S:
                back_off_s = _FIRST_BACK_OFF_S
            with self._condition:
                if not self._closing:
                    logger.warning("the lease keeper %s; trying again", outcome)
                if self._condition.wait_for(lambda: self._closing, back_off_s):
                    return
            back_off_s = min(2 * back_off_s, _LONGEST_BACK_OFF_S)

    def _spawn(self, resumes: bool) -> subprocess.Popen[bytes] | None:
        """A sidecar that was told everything, or None when it is not wanted any more."""
        # Held until Start is written, so that no update gets in before it.
        with self._pipe_lock:
            with self._condition:
                if self._closing:
                    return None
                process = self._process = subprocess.Popen(
                    [sys.executable, "-m", "dejavu.store.keeper"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=_environment(),
                    # Ctrl-C and Ctrl-Z go to the owner alone, and the owner alone decides.
                    start_new_session=True,
                )
                start = Start(
                    spec=self._spec,
                    ttl_s=self._ttl_s,
                    entries=dict(self._entries),
                    owner_pid=os.getpid(),
                    guard=self._guard,
                    resumes=resumes,
                )
                self._dirty.clear()
            _send(process, start)
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> bool:
        """The sidecar has nothing more to say; True when it had held the lease."""
        assert process.stdout is not None, "the sidecar is started with a pipe"
        held = False
        for line in process.stdout:
            message = to_owner(line)
            if isinstance(message, Trouble):
                logger.warning("the lease cannot be kept at the moment: %s", message.reason)
                continue
            with self._condition:
                if isinstance(message, Held):
                    held = True
                    self._holds += 1
                    self._lease_id = message.lease_id
                elif isinstance(message, Replaced):
                    logger.warning("another has put %s: they are left to it", ", ".join(message.keys))
                elif isinstance(message, Lost):
                    self._losses += 1
                    logger.warning("the lease was lost; registering anew")
                self._condition.notify_all()
        return held

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        with self._condition:
            self._process = None
        with self._pipe_lock:
            _close_pipe(process)
        assert process.stdout is not None, "the sidecar is started with a pipe"
        process.stdout.close()

    def _write(self) -> None:
        """Sends what ``update`` noted, and the end of the pipe at ``close``. A thread, for a pipe may be full."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closing or (self._dirty and self._process is not None))
                process, closing = self._process, self._closing
                message = Update(entries={key: self._entries[key] for key in self._dirty})
                self._dirty.clear()
            with self._pipe_lock:
                if process is not None and closing:
                    _close_pipe(process)
                elif process is not None:
                    _send(process, message)
            if closing:
                return


def _environment() -> dict[str, str]:
    """The owner's environment, in which this very package is found wherever the owner was started."""
    root = str(Path(dejavu.__file__).parents[1])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "GRPC_VERBOSITY": "NONE", "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}


def _send(process: subprocess.Popen[bytes], message: ToSidecar) -> None:
    """The sidecar will read the message, unless it is dead: then the next one is told everything by its Start."""
    assert process.stdin is not None, "the sidecar is started with a pipe"
    with contextlib.suppress(BrokenPipeError, ValueError):
        process.stdin.write(line_of(message))
        process.stdin.flush()


def _close_pipe(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None, "the sidecar is started with a pipe"
    # Closing flushes first, which fails on a dead sidecar.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
