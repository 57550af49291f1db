"""The sidecar that keeps a process's lease alive (``python -m dejavu.store.keeper``, started by LeaseKeeper only).

Its life: read Start; grant the lease and put the keys; refresh every third of the TTL; put what Updates bring; grant
and put everything anew when the lease was lost. At the end of its input the owner is gone or done: revoke, exit.
It runs in a process of its own, so neither a held GIL nor a long load in the owner can starve the lease. The owner
counts as frozen only when the kernel says that it is stopped; then the lease is left to run out.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from pathlib import Path

from dejavu.errors import DejavuError
from dejavu.store.keeper_messages import (
    Cut,
    Held,
    Lost,
    Replaced,
    Start,
    ToOwner,
    Trouble,
    Update,
    line_of,
    to_sidecar,
)
from dejavu.store.lease_calls import LeaseCalls, LeaseGone

logger = logging.getLogger(__name__)

# How soon a continued owner gets its refresh: well inside the third of a TTL that is left to it at least.
_STOPPED_POLL_S = 0.1
_OWNER_CHECK_PERIOD_S = 1.0
_FIRST_BACK_OFF_S = 0.05
_LONGEST_BACK_OFF_S = 0.5
_READ_BYTES = 1 << 16


class Sidecar:
    """One lease, its keys and the pipe to their owner. One thread; ``run`` returns when the owner is gone."""

    def __init__(self, start: Start, input_fd: int, output_fd: int, rest: bytes) -> None:
        self._calls = LeaseCalls(start.spec, start.ttl_s)
        self._entries = dict(start.entries)
        self._dirty: set[str] = set()
        self._given_up: set[str] = set()
        self._owner_pid = start.owner_pid
        self._expects_keys = start.resumes
        self._input_fd = input_fd
        self._output_fd = output_fd
        self._guard = start.guard
        self._had_lease = start.resumes
        self._is_cut = False
        self._unread = b""
        self._take(rest)
        self._lease_id: int | None = None
        self._due_s = 0.0
        self._back_off_s = 0.0
        self._troubled = False

    def run(self) -> None:
        """The owner has closed its end of the pipe or is dead, and the lease is revoked if etcd could be reached."""
        wait_s = 0.0
        # The second question is for an owner that has forked: its child then holds the pipe open as well.
        while self._take_input(wait_s) and os.getppid() == self._owner_pid:
            if self._is_cut or is_stopped(self._owner_pid):
                wait_s = _STOPPED_POLL_S
                continue
            try:
                self._step(time.monotonic())
            except DejavuError as error:
                self._failed(error)
                wait_s = self._back_off_s
            else:
                self._back_off_s = 0.0
                self._troubled = False
                wait_s = min(max(0.0, self._due_s - time.monotonic()), _OWNER_CHECK_PERIOD_S)
        if self._lease_id is not None and not self._is_cut:
            try:
                self._calls.revoke(self._lease_id)
            except DejavuError as error:
                # Often etcd ended together with the owner.
                logger.info("the lease is left to run out: %s", error)
        self._calls.close()

    def _step(self, now_s: float) -> None:
        """The lease is held, is fresh, and etcd has the newest values. Raises StoreUnavailable or StoreRefused."""
        try:
            if self._lease_id is not None and now_s >= self._due_s:
                self._calls.refresh(self._lease_id)
                self._schedule(now_s)
            if self._lease_id is not None and self._dirty:
                changed = {key: self._entries[key] for key in self._dirty}
                self._calls.put_all(changed, self._lease_id)
                self._dirty.clear()
        except LeaseGone:
            self._lease_id = None
            self._tell(Lost())
        if self._lease_id is None:
            self._register(now_s)

    def _register(self, now_s: float) -> None:
        lease_id = self._calls.grant()
        revisions = self._keep_own() if self._had_lease and self._guard else None
        missing = self._calls.put_all(self._entries, lease_id, revisions)
        if self._expects_keys and missing:
            self._tell(Lost())
        self._expects_keys = False
        self._had_lease = True
        self._lease_id = lease_id
        self._dirty.clear()
        self._schedule(now_s)
        self._tell(Held(lease_id=lease_id))

    def _keep_own(self) -> dict[str, int]:
        """Keys that somebody else has put since are given up: whoever was taken for dead may have been replaced.

        Returns the revisions at which the others were found.
        """
        # Of a value without the guard nobody can say whose it is; such keys are the newest lease's.
        guarded = tuple(name for name, value in self._entries.items() if self._guard in value)
        found = self._calls.look(guarded)
        others = tuple(name for name, (value, _) in found.items() if self._guard not in value)
        if others:
            self._entries = {name: value for name, value in self._entries.items() if name not in others}
            self._given_up.update(others)
            self._tell(Replaced(keys=others))
        return {name: found[name][1] if name in found else 0 for name in guarded if name not in others}

    def _schedule(self, now_s: float) -> None:
        # Counted from before the call: a slow answer must not make the next refresh late.
        self._due_s = now_s + self._calls.granted_s / 3

    def _failed(self, error: DejavuError) -> None:
        self._back_off_s = min(max(2 * self._back_off_s, _FIRST_BACK_OFF_S), _LONGEST_BACK_OFF_S)
        if not self._troubled:
            self._troubled = True
            self._tell(Trouble(reason=str(error)))

    def _take_input(self, wait_s: float) -> bool:
        """Updates that arrived within ``wait_s`` are noted; False at the end of the input."""
        ready, _, _ = select.select([self._input_fd], [], [], wait_s)
        if not ready:
            return True
        data = os.read(self._input_fd, _READ_BYTES)
        if not data:
            return False
        self._take(data)
        return True

    def _take(self, data: bytes) -> None:
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            message = to_sidecar(line)
            if isinstance(message, Cut):
                self._is_cut = message.is_cut
            elif isinstance(message, Update):
                own = {name: value for name, value in message.entries.items() if name not in self._given_up}
                self._entries.update(own)
                self._dirty.update(own)

    def _tell(self, message: ToOwner) -> None:
        try:
            os.write(self._output_fd, line_of(message))
        except BrokenPipeError:
            # The owner is going; the end of the input says so next.
            logger.debug("nobody reads %s any more", message)


def is_stopped(pid: int) -> bool:
    """True while the kernel holds the process stopped (SIGSTOP, Ctrl-Z or a debugger)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        # Gone (the pipe will say so), or a system without /proc.
        return False
    # The command's name is in parentheses and may hold any character, parentheses included.
    return stat.rpartition(b")")[2].split()[0] in (b"T", b"t")


def main() -> None:
    """Serves the owner at the other end of standard input until it is gone."""
    # The owner decides when it ends, not the terminal that it shares with this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="lease keeper: %(message)s")
    input_fd, output_fd = sys.stdin.fileno(), sys.stdout.fileno()
    received = b""
    while b"\n" not in received:
        data = os.read(input_fd, _READ_BYTES)
        if not data:
            return
        received += data
    first, _, rest = received.partition(b"\n")
    start = to_sidecar(first)
    if not isinstance(start, Start):
        raise SystemExit("the first line must be a start message")
    Sidecar(start, input_fd, output_fd, rest).run()


if __name__ == "__main__":
    main()
