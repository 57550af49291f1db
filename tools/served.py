"""``workflow=serve`` as its user starts it, for tools and tests that watch it from outside."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

PATIENCE_S = 180.0
_ENDED = None


class Served:
    """The command, once it serves: ``address`` is its host and port, ``endpoint`` that of its etcd.

    Raises RuntimeError with what it said when it ends before that.
    """

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dejavu.run", "workflow=serve", "serve.port=0", "hydra.run.dir=run", *overrides],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        try:
            self.endpoint = self._said(r"--endpoints=(\S+)")
            self.address = self._said(r"http://(\S+)/v1")
        except BaseException:
            self.stop()
            raise

    def get(self, path: str) -> str:
        """The body of an answer. Raises URLError for another status than 200."""
        with urlopen(f"http://{self.address}{path}", timeout=PATIENCE_S) as response:
            return str(response.read().decode())

    def state(self) -> dict[str, Any]:
        """What ``/state`` gives."""
        return dict(json.loads(self.get("/state")))

    def stop(self) -> None:
        """The command was told to stop, and has ended. Idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(PATIENCE_S)
        self._reader.join()

    def _said(self, pattern: str) -> str:
        said: list[str] = []
        while (line := self._lines.get(timeout=PATIENCE_S)) is not _ENDED:
            said.append(line)
            found = re.search(pattern, line)
            if found is not None:
                return found.group(1)
        raise RuntimeError(f"the service has ended: {''.join(said)}")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line)
        self._lines.put(_ENDED)


@contextlib.contextmanager
def served(folder: Path, *overrides: str) -> Iterator[Served]:
    """The service runs inside, with these overrides, and has ended afterwards."""
    service = Served(folder, *overrides)
    try:
        yield service
    finally:
        service.stop()
