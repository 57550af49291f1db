"""What owns one worker process on a node of a Ray cluster; runs there, as an actor."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

import dejavu
from dejavu.control.member import encode_json
from dejavu.engine.worker_spec import decode_worker_spec


class WorkerOwner:
    """Starts one process, which ends when this one does: it reads from a pipe that this one holds. Any thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def address(self) -> str:
        """The address of this node, as Ray knows it."""
        return str(importlib.import_module("ray").util.get_node_ip_address())

    def start(self, line: bytes, host: str, log: str, num_threads: int) -> int:
        """The worker of that spec line runs, listens on ``host`` and logs to ``log``; its process id."""
        spec = msgspec.structs.replace(decode_worker_spec(line), host=host)
        path = Path(log)
        path.parent.mkdir(parents=True, exist_ok=True)
        root = str(Path(dejavu.__file__).parents[1])
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(num_threads),
            "TOKENIZERS_PARALLELISM": "false",
            "GRPC_VERBOSITY": "NONE",
            # The very package that this process has found, wherever it was started.
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        }
        with path.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dejavu.worker"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self.tell(encode_json(spec))
        return self._process.pid

    def wait(self) -> int:
        """The process has ended; its exit status, negative: the signal that ended it."""
        assert self._process is not None, "started first"
        return self._process.wait()

    def tell(self, line: bytes) -> None:
        """The process will read one more line, if it runs."""
        assert self._process is not None, "started first"
        assert self._process.stdin is not None, "started with a pipe"
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def signal(self, signum: int) -> None:
        """The process has got the signal, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.Signals(signum))
