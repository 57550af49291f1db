"""Folders that are made once, whole or not at all, whichever processes want them at the same time."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from dejavu.errors import ConfigError

Progress: TypeAlias = Callable[[str, int, int, Literal["bytes", "items"]], None]
"""Called with what is being done, how much of it is done, and how much there is."""


def make_folder_once(target: Path, make: Callable[[Path], None]) -> Path:
    """``target`` exists, filled by ``make`` in a folder beside it that was then renamed.

    Blocks while another process makes the same folder. What a killed process left half made is removed.
    Raises ConfigError when the parent cannot be written to.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.parent / f".{target.name}.lock"
        with _locked(lock):
            if not target.is_dir():
                _make(target, make)
    except PermissionError as error:
        raise ConfigError(
            f"cache folder {target.parent} cannot be written: {error.strerror}\n"
            "set DEJAVU_CACHE to a folder of your own"
        ) from error
    return target


def _make(target: Path, make: Callable[[Path], None]) -> None:
    prefix = f".{target.name}.making-"
    # The lock is ours, so whatever bears this name belongs to a process that is gone.
    for leftover in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    half_made = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        make(half_made)
        half_made.chmod(0o755)
        half_made.rename(target)
    finally:
        shutil.rmtree(half_made, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The file lock is held; the kernel gives it back when the process ends, however it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
