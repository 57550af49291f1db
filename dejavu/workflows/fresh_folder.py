"""A comparison of live runs begins in a folder without those of another: appended files would mix the two."""

from __future__ import annotations

from pathlib import Path

from dejavu.errors import ConfigError


def check_fresh(folder: Path) -> None:
    """There is no ``folder`` yet. Raises ConfigError naming what lies there, before anything has run."""
    if folder.exists():
        raise ConfigError(
            f"hydra.run.dir={folder.parent}: holds an earlier comparison ({folder.name}/)\n"
            "name another folder, or remove this one"
        )
