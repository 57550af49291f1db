"""Fixtures for every test: made models are kept between runs, and clusters leave nothing behind."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.processes import MARK, our_processes, shared_memory_files, wait_gone


@pytest.fixture(scope="session", autouse=True)
def _environment() -> None:
    """Children are told by a mark. One thread everywhere: few cores, and tests compare token ids."""
    os.environ[MARK] = uuid.uuid4().hex
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After the test no process and no shared-memory file is there that was not there before."""
    before, files = our_processes(), shared_memory_files()
    yield
    assert wait_gone(before, timeout_s=10.0) == {}
    assert shared_memory_files() - files == set()


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A run's output folder."""
    return tmp_path / "output"
