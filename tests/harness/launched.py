"""``python -m dejavu.run`` as a user starts it, watched from outside through an etcd of the test's own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dejavu.control.member import Member, decode_member
from dejavu.store.client import StoreClient
from dejavu.store.embedded import EmbeddedEtcd
from dejavu.store.keys import Keys
from dejavu.store.spec import StoreSpec

_PATIENCE_S = 120.0


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = _PATIENCE_S) -> None:
    """``condition`` has come true. Fails the test naming ``what`` at the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


@dataclass(slots=True)
class Launched:
    """A running command, its output folder, and the store through which it can be watched."""

    process: subprocess.Popen[str]
    folder: Path
    store: StoreSpec
    keys: Keys

    def members(self) -> dict[str, Member]:
        """The registered workers."""
        with contextlib.closing(StoreClient(self.store)) as client:
            entries = client.get_prefix(self.keys.workers_prefix).entries
        return {entry.key: decode_member(entry.value) for entry in entries}

    def all_keys(self) -> tuple[str, ...]:
        """Everything of the cluster in the store."""
        with contextlib.closing(StoreClient(self.store)) as client:
            return tuple(entry.key for entry in client.get_prefix(self.keys.prefix).entries)

    def wait_state(self, state: str, count: int) -> None:
        """``count`` workers are registered in this state."""
        eventually(
            lambda: sum(member.state == state for member in self.members().values()) >= count,
            f"{count} workers {state}",
        )

    @property
    def completions(self) -> Path:
        """The run's lines."""
        return self.folder / "completions.jsonl"

    def num_completed(self) -> int:
        """Lines on disk."""
        return len(self.completions.read_text().splitlines()) if self.completions.exists() else 0

    def send(self, signum: signal.Signals) -> None:
        """The launcher alone gets the signal."""
        self.process.send_signal(signum)

    def end(self, timeout_s: float = 60.0) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err


@contextlib.contextmanager
def own_store(folder: Path) -> Iterator[StoreSpec]:
    """An etcd that belongs to the test."""
    etcd = EmbeddedEtcd(folder / "data", log_path=folder / "etcd.log")
    try:
        yield StoreSpec(endpoints=(etcd.endpoint,))
    finally:
        etcd.stop()


@contextlib.contextmanager
def launched(folder: Path, store: StoreSpec, *overrides: str) -> Iterator[Launched]:
    """The command runs with these overrides; whatever the test did, it is gone at the end."""
    output = folder / "run"
    words = [
        "store=external",
        f"store.endpoints=[{','.join(store.endpoints)}]",
        "cluster.name=test",
        "cluster.lease_ttl_s=2",
        f"hydra.run.dir={output}",
        *overrides,
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "dejavu.run", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield Launched(process=process, folder=output, store=store, keys=Keys("test"))
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
