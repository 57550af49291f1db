"""A stream for what a person may miss: a full disk or a reader that is gone costs lines, and ends nobody's work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import IO, Any, cast

from rich.console import Console


class LossyStream:
    """A text stream whose writes never fail; everything else is the stream's that it stands before."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """The text was written, or is lost."""
        with self._losing():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """What was written is with its reader, or is lost."""
        with self._losing():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._silence()
        except OSError:
            # A disk may have room again for later lines.
            pass

    def _silence(self) -> None:
        """Nobody will ever read it: nor shall the interpreter's last flush fail, and change the exit status."""
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)


def lossy(console: Console) -> Console:
    """The console prints what can be printed, and raises nothing where it cannot."""
    if not isinstance(console.file, LossyStream):
        console.file = cast(IO[str], LossyStream(console.file))
    return console
