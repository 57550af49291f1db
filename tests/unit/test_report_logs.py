"""A worker's log: each line tells where the worker stood."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dejavu.report.logs import WorkerLog, setup_worker_log, tail


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w0.log"


@pytest.fixture
def log(path: Path) -> Iterator[WorkerLog]:
    """A worker's log; the root logger is as before afterwards."""
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    log = setup_worker_log(path, "w0", "INFO")
    yield log
    log.close()
    root.setLevel(before[0])
    assert root.handlers == before[1]


def test_line_carries_time_level_worker_epoch_and_microbatch(log: WorkerLog, path: Path) -> None:
    log.set_epoch(3)
    log.set_microbatch(1)
    logging.getLogger("dejavu.engine").info("took %d rows", 4)
    line = path.read_text()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO    w0 epoch=3 mb=1 dejavu\.engine: took 4 rows\n", line
    )


def test_line_before_a_plan_has_dashes_and_debug_is_below_the_level(log: WorkerLog, path: Path) -> None:
    logging.getLogger("dejavu.engine").debug("chatter")
    logging.getLogger("dejavu.engine").info("started")
    assert path.read_text().endswith("INFO    w0 epoch=- mb=- dejavu.engine: started\n")
    assert "chatter" not in path.read_text()


def test_microbatch_is_the_threads_own_and_the_epoch_everybodys(log: WorkerLog, path: Path) -> None:
    log.set_epoch(2)
    log.set_microbatch(7)
    thread = threading.Thread(target=lambda: logging.getLogger("dejavu.transport").info("sent"))
    thread.start()
    thread.join()
    logging.getLogger("dejavu.engine").info("computed")
    log.set_microbatch(None)
    logging.getLogger("dejavu.engine").info("idle")
    assert re.findall(r"epoch=\S+ mb=\S+", path.read_text()) == ["epoch=2 mb=-", "epoch=2 mb=7", "epoch=2 mb=-"]


def test_every_line_of_a_traceback_carries_the_prefix(log: WorkerLog, path: Path) -> None:
    try:
        raise KeyError("gone\nfor good")
    except KeyError:
        logging.getLogger("dejavu.engine").exception("first line\nsecond line")
    lines = path.read_text().splitlines()
    assert len(lines) > 4
    assert all("ERROR   w0 epoch=- mb=- dejavu.engine: " in line for line in lines)
    assert "Traceback" in path.read_text()


def test_log_is_appended_to_by_the_next_incarnation(log: WorkerLog, path: Path) -> None:
    logging.getLogger("dejavu").info("first")
    log.close()
    again = setup_worker_log(path, "w0")
    logging.getLogger("dejavu").info("second")
    again.close()
    again.close()
    assert [line.rsplit(" ", 1)[1] for line in path.read_text().splitlines()] == ["first", "second"]


def test_tail_gives_the_last_lines_of_a_long_file_with_broken_bytes(path: Path) -> None:
    path.write_bytes(b"".join(b"line %d \xff" % number + b"x" * 500 + b"\n" for number in range(1000)))
    last = tail(path, 200).splitlines()
    assert len(last) == 200
    assert last[0].startswith("line 800 �")
    assert last[-1].startswith("line 999 ")


def test_tail_of_a_short_file_is_all_of_it_and_of_none_is_empty(path: Path) -> None:
    assert tail(path) == ""
    path.write_text("")
    assert tail(path) == ""
    path.write_text("a\n\nb")
    assert tail(path, 20) == "a\n\nb"
    assert tail(path, 1) == "b"
    assert tail(path, 0) == ""
