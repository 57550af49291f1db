"""What owns one worker process on a node of a Ray cluster; runs there, as an actor."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import threading
from pathlib import Path

import msgspec

import dejavu
from dejavu.control.member import encode_json
from dejavu.engine.worker_spec import decode_worker_spec
from operators.worker_process import WORKER_COMMAND, start_process, write_line


class WorkerOwner:
    """Starts one process, which ends when this one does: it reads from a pipe that this one holds. Any thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def address(self) -> str:
        """The address of this node, as Ray knows it."""
        return str(importlib.import_module("ray").util.get_node_ip_address())

    def start(self, line: bytes, host: str, log: str, num_threads: int) -> int:
        """The worker of that spec line runs, publishes ``host`` and logs to ``log``; its process id."""
        spec = msgspec.structs.replace(decode_worker_spec(line), host=host)
        path = Path(log)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The very package that this process has found, wherever it was started.
        root = str(Path(dejavu.__file__).parents[1])
        found_at = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._process = start_process(WORKER_COMMAND, path, num_threads=num_threads, more={"PYTHONPATH": found_at})
        self.tell(encode_json(spec))
        return self._process.pid

    def wait(self) -> int:
        """The process has ended; its exit status, negative: the signal that ended it."""
        assert self._process is not None, "started first"
        return self._process.wait()

    def tell(self, line: bytes) -> None:
        """The process will read one more line, if it runs."""
        assert self._process is not None, "started first"
        with self._lock:
            write_line(self._process, line)

    def signal(self, signum: int) -> None:
        """The process has got the signal, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.Signals(signum))
