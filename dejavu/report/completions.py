"""``completions.jsonl``: one line a request, on disk as soon as the request has ended."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from types import TracebackType

import msgspec

from dejavu.errors import DejavuError
from dejavu.request import Completion

logger = logging.getLogger(__name__)


class CompletionWriter:
    """An append-only file of completions; any thread may write. A line is one write call, never buffered here."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._encoder = msgspec.json.Encoder()
        self._num_written = 0
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        _drop_torn_tail(self._descriptor)

    @property
    def num_written(self) -> int:
        """Lines written by this writer."""
        return self._num_written

    def write(self, completion: Completion) -> None:
        """The line is with the operating system: it outlives this process. Raises OSError, e.g. on a full disk."""
        line = self._encoder.encode(completion) + b"\n"
        with self._lock:
            if self._descriptor is None:
                raise ValueError(f"{self._path} is closed; completion {completion.id} came too late")
            written = os.write(self._descriptor, line)
            # A short write happens when the disk fills up: the rest then raises the reason.
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
            self._num_written += 1

    def close(self) -> None:
        """No more lines are taken. Idempotent."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def __enter__(self) -> CompletionWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_completions(path: Path) -> list[Completion]:
    """The completions of a file, in the order in which they ended.

    An unfinished last line (its writer was killed in the write, or its disk was full) is left out with a warning.
    Raises DejavuError, naming the line, when any other line is no completion.
    """
    *lines, tail = path.read_bytes().split(b"\n")
    completions = [_decode(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if tail:
        try:
            completions.append(_decode(tail, f"{path}:{len(lines) + 1}"))
        except DejavuError as error:
            logger.warning("the last line is unfinished and left out: %s", error)
    return completions


def _decode(line: bytes, place: str) -> Completion:
    """The completion of one line. Raises DejavuError that names ``place``."""
    try:
        return msgspec.json.decode(line, type=Completion)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DejavuError(f"{place} is no completion: {error}") from error


def _drop_torn_tail(descriptor: int) -> None:
    """The file ends with a whole line: a tail without a line end was torn while it was written."""
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        logger.warning("dropped an unfinished last line of %d bytes", len(content) - whole)
        os.ftruncate(descriptor, whole)
