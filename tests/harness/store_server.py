"""An etcd that the tests may kill, freeze and wipe, and what they wait with."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dejavu.store import Change, StoreClient, StoreSpec
from dejavu.store.connection import Connection
from dejavu.store.embedded import etcd_binary, free_ports

PATIENCE_S = 30.0


class StoreServer:
    """One etcd member on a fixed port, without a supervisor: it stays dead until ``start``."""

    def __init__(self, folder: Path) -> None:
        self._data_dir = folder / "data"
        self._log_path = folder / "etcd.log"
        self._ports = free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._ports[0]}"

    @property
    def spec(self) -> StoreSpec:
        return StoreSpec(endpoints=(self.endpoint,), timeout_s=10.0)

    def start(self) -> None:
        client_url, peer_url = (f"http://127.0.0.1:{port}" for port in self._ports)
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(etcd_binary()),
                    f"--data-dir={self._data_dir}",
                    f"--listen-client-urls={client_url}",
                    f"--advertise-client-urls={client_url}",
                    f"--listen-peer-urls={peer_url}",
                    f"--initial-advertise-peer-urls={peer_url}",
                    f"--initial-cluster=default={peer_url}",
                    "--heartbeat-interval=50",
                    "--election-timeout=500",
                    "--log-level=error",
                    "--unsafe-no-fsync",
                ],
                stdout=log,
                stderr=log,
            )
        with contextlib.closing(StoreClient(self.spec)) as client:
            client.get("/ready")

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def wipe(self) -> None:
        self.kill()
        shutil.rmtree(self._data_dir)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside, the member keeps its connections open and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def compact(self) -> None:
        """All history before the newest revision is gone."""
        connection = Connection(self.spec, self.endpoint)
        try:
            with contextlib.closing(StoreClient(self.spec)) as client:
                revision = client.get_prefix("/").revision
            request = connection.rpc.CompactionRequest(revision=revision, physical=True)
            connection.call(connection.kv.Compact, request, PATIENCE_S)
        finally:
            connection.close()


class Recorder:
    """Keeps every change of a watch, and lets a test wait for what they add up to."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.changes: list[Change] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, change: Change) -> None:
        with self._condition:
            self.changes.append(change)
            self._condition.notify_all()
        self.gate.wait(PATIENCE_S)

    def wait_for(self, condition: Callable[[Recorder], bool], what: str) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: condition(self), PATIENCE_S), f"{what}; got {self.changes}"

    @property
    def state(self) -> dict[str, bytes]:
        """What a follower of the changes believes."""
        state: dict[str, bytes] = {}
        for change in self.changes:
            state.update({entry.key: entry.value for entry in change.puts})
            for key in change.deletes:
                del state[key]
        return state

    @property
    def deletes(self) -> list[str]:
        return [key for change in self.changes for key in change.deletes]

    def puts_of(self, key: str) -> list[bytes]:
        return [entry.value for change in self.changes for entry in change.puts if entry.key == key]


def until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Returns once the condition holds; for states that nothing can announce (another process's end)."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, what
        pause.wait(0.02)


def is_running(pid: int) -> bool:
    """False when the process is gone, or dead and merely not yet reaped by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processes_marked(mark: str) -> list[int]:
    """All processes that inherited the mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (folder / "environ").read_bytes() and is_running(int(folder.name)):
                    found.append(int(folder.name))
    return found


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Afterwards no process of the test is running and no thread of the store is left."""
    mark = f"DEJAVU_TEST_MARK={uuid.uuid4().hex}"
    monkeypatch.setenv(*mark.split("="))
    yield
    until(lambda: not processes_marked(mark), f"left running: {processes_marked(mark)}", 10.0)
    names = ("watch", "lease-", "embedded-etcd")
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith(names)], "threads left", 5.0)


@pytest.fixture
def server(tmp_path: Path, nothing_left: None) -> Iterator[StoreServer]:
    """A running member; gone afterwards, whatever the test did to it."""
    server = StoreServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def client(server: StoreServer) -> Iterator[StoreClient]:
    with contextlib.closing(StoreClient(server.spec)) as client:
        yield client
