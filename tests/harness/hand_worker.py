"""A worker that no launcher owns: ``python hand_worker.py NAME FOLDER`` starts that worker in a session of its own.

What the launcher started stays as a stand-in: killing it does not end the worker, whose process id is then in
``FOLDER/NAME.pid``. Every other worker, and the next process of that name, is an ordinary one.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

from dejavu import worker
from dejavu.engine.worker_spec import decode_worker_spec


def read_line(descriptor: int) -> bytes:
    """What comes until the end of the line; nothing at the end of the input."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(descriptor, 1)):
        line += byte
    return line


def stand_in(line: bytes, folder: Path, name: str) -> int:
    """The worker runs on its own and reads from a FIFO that it keeps open itself: no end of a launcher ends it."""
    fifo = folder / f"{name}.fifo"
    os.mkfifo(fifo)
    source = os.open(fifo, os.O_RDWR)
    os.write(source, line)
    process = subprocess.Popen([sys.executable, "-m", "dejavu.worker"], stdin=source, start_new_session=True)
    (folder / f"{name}.pid").write_text(str(process.pid))
    return process.wait()


def pass_on(line: bytes) -> None:
    """Standard input gives the line that was read from it, and all that comes after it."""
    source = os.dup(0)
    end, begin = os.pipe()
    os.dup2(end, 0)

    def pump() -> None:
        os.write(begin, line)
        while piece := os.read(source, 65536):
            os.write(begin, piece)
        os.close(begin)

    threading.Thread(target=pump, daemon=True).start()


def main(name: str, folder: Path) -> int:
    """The worker's exit status."""
    line = read_line(0)
    if decode_worker_spec(line).name == name and not (folder / f"{name}.fifo").exists():
        return stand_in(line, folder, name)
    pass_on(line)
    return worker.main()


if __name__ == "__main__":
    status = main(sys.argv[1], Path(sys.argv[2]))
    logging.shutdown()
    os._exit(status)
