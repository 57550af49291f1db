"""Everything that can be wrong with a command line, found before anything starts."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from hydra.types import RunMode
from omegaconf import DictConfig

from dejavu.cli.arguments import is_query
from dejavu.cli.composer import Composer, composer, declaration, sweep_jobs
from dejavu.cli.overrides import check_overrides, normalise
from dejavu.config import Config, load
from dejavu.errors import ConfigError

MOST_JOBS = 24
"""Jobs of a sweep that are checked beforehand; each composes for some hundredths of a second."""


def check_command(args: argparse.Namespace, directory: Path, check_config: Callable[[Config], None]) -> None:
    """The command can be carried out as far as the declaration shows; ``args.overrides`` is in Hydra's form.

    Args:
        args: flags and overrides.
        directory: the user's, where relative paths start.
        check_config: raises ConfigError for a declaration that cannot be run.

    Raises:
        ConfigError: of at most three lines.
    """
    args.overrides = normalise(args.overrides)
    with composer(args) as compose:
        check_overrides(args.overrides, compose.compose([]), compose.options())
        for tree in _trees(compose, args):
            if is_query(args):
                continue
            _check_output(tree, directory)
            check_config(load(declaration(tree), directory))


def _trees(compose: Composer, args: argparse.Namespace) -> list[DictConfig]:
    """What the command composes: one tree, or one for each of the first jobs of a sweep."""
    whole = compose.compose(args.overrides, multirun=True)
    if is_query(args) or not (args.multirun or whole.hydra.mode == RunMode.MULTIRUN):
        return [compose.compose(args.overrides)]
    return [compose.compose(job) for job in sweep_jobs(whole, args.overrides, most=MOST_JOBS)]


def _check_output(tree: DictConfig, directory: Path) -> None:
    """Raises ConfigError when no folder can be made where the output shall go."""
    key = "hydra.sweep.dir" if tree.hydra.mode == RunMode.MULTIRUN else "hydra.run.dir"
    folder = directory / str(tree.hydra.sweep.dir if key == "hydra.sweep.dir" else tree.hydra.run.dir)
    existing = folder
    while not existing.exists():
        existing = existing.parent
    try:
        # Only writing tells: permissions say nothing to root, and nothing about a read-only file system.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise ConfigError(f"{key}={folder}: {existing} cannot be written to ({error.strerror})") from error
