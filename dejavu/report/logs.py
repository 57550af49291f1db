"""A worker's log: every line says when, how grave, which worker, under which epoch and in which microbatch."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

LINE_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(worker)s epoch=%(epoch)s mb=%(microbatch)s %(name)s: "
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
TAIL_BLOCK_BYTES = 64 * 1024


class WorkerLog(logging.Filter):
    """Where a worker stands, stamped on its log records. The epoch is the process's, the microbatch the thread's."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker
        self._epoch: int | None = None
        self._of_thread = threading.local()
        self._handler: logging.Handler | None = None

    def set_epoch(self, epoch: int | None) -> None:
        """Later lines of every thread carry ``epoch``."""
        self._epoch = epoch

    def set_microbatch(self, microbatch: int | None) -> None:
        """Later lines of the calling thread carry ``microbatch``."""
        self._of_thread.microbatch = microbatch

    def filter(self, record: logging.LogRecord) -> bool:
        """The record carries the place; it is never held back."""
        microbatch = getattr(self._of_thread, "microbatch", None)
        record.worker = self._worker
        record.epoch = "-" if self._epoch is None else self._epoch
        record.microbatch = "-" if microbatch is None else microbatch
        return True

    def attach(self, handler: logging.Handler) -> None:
        """The root logger writes to ``handler`` with these stamps."""
        handler.addFilter(self)
        handler.setFormatter(PrefixedFormatter(LINE_FORMAT, TIME_FORMAT))
        logging.getLogger().addHandler(handler)
        self._handler = handler

    def close(self) -> None:
        """The root logger is as before and the file is closed. Idempotent."""
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
            self._handler.close()
            self._handler = None


class PrefixedFormatter(logging.Formatter):
    """Every line of a record, a traceback's too, starts with the prefix that ``fmt`` describes."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's lines, joined. What the prefix needs is stamped on the record already."""
        record.asctime = self.formatTime(record, self.datefmt)
        lines = record.getMessage().splitlines() or [""]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        if record.stack_info:
            lines += self.formatStack(record.stack_info).splitlines()
        prefix = self.formatMessage(record)
        return "\n".join(prefix + line for line in lines)


def setup_worker_log(path: Path, worker: str, level: int | str = logging.INFO) -> WorkerLog:
    """This process logs to ``path`` (appending, each record flushed), stamped with the returned log's place."""
    log = WorkerLog(worker)
    log.attach(logging.FileHandler(path, mode="a", encoding="utf-8"))
    logging.getLogger().setLevel(level)
    return log


def tail(path: Path, lines: int = 20) -> str:
    """The last ``lines`` lines of a log, for the message about a dead worker; empty where there is no such file."""
    try:
        with path.open("rb") as file:
            return _last_lines(file.fileno(), lines).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _last_lines(descriptor: int, lines: int) -> bytes:
    """The end of a file, read block by block from behind."""
    start = os.fstat(descriptor).st_size
    content = b""
    while start > 0 and content.rstrip(b"\n").count(b"\n") < lines:
        block_bytes = min(TAIL_BLOCK_BYTES, start)
        start -= block_bytes
        content = os.pread(descriptor, block_bytes, start) + content
    return b"\n".join(content.rstrip(b"\n").split(b"\n")[-lines:]) if lines > 0 else b""
