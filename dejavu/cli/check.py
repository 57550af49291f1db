"""Everything that can be wrong with a command line, found before anything starts."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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

_HYDRAS = ("hydra.", "hydra/")


def check_command(
    args: argparse.Namespace, directory: Path, check_config: Callable[[Config], None]
) -> tuple[tuple[str, ...], ...]:
    """The command can be carried out as far as the declaration shows; ``args.overrides`` is in Hydra's form.

    Returns the overrides of a sweep's points; of anything else, nothing. A point that is refused does not stop a sweep
    of which another one may run: it is refused again in its turn, and the others have their outputs.

    Args:
        args: flags and overrides.
        directory: the user's, where relative paths start.
        check_config: raises ConfigError for a declaration that cannot be run.

    Raises:
        ConfigError: of at most three lines; of a sweep, the first point's when each that was checked is refused.
    """
    args.overrides = normalise(args.overrides)
    with composer(args) as compose:
        parsed = check_overrides(args.overrides, partial(compose.compose, []), compose.options())
        has_sweep = any(override.is_sweep_override() for override in parsed)
        if is_query(args):
            compose.compose(args.overrides)
            return ()
        tree, jobs = _first_tree(compose, args, directory, has_sweep=has_sweep)
        if tree is not None:
            check_config(load(declaration(tree), directory, args.overrides))
            return ()
        refused = list(_refused(compose, jobs[:MOST_JOBS], directory, check_config))
        if len(refused) == len(jobs[:MOST_JOBS]):
            raise refused[0]
        return tuple(
            tuple(text for text in job if not text.startswith(("hydra.", "hydra/", "+hydra", "++hydra")))
            for job in jobs
        )


def _first_tree(
    compose: Composer, args: argparse.Namespace, directory: Path, *, has_sweep: bool
) -> tuple[DictConfig | None, list[list[str]]]:
    """What the command composes: one tree; or None, and the overrides of each job of a sweep."""
    if not (args.multirun or has_sweep):
        tree = compose.compose(args.overrides)
        if tree.hydra.mode != RunMode.MULTIRUN:
            _check_output("hydra.run.dir", directory / str(tree.hydra.run.dir))
            return tree, []
    whole = compose.compose(args.overrides, multirun=True)
    if not (args.multirun or whole.hydra.mode == RunMode.MULTIRUN):
        # Raises: several values without -m.
        compose.compose(args.overrides)
    _check_output("hydra.sweep.dir", directory / str(whole.hydra.sweep.dir))
    return None, sweep_jobs(whole, args.overrides)


def _refused(
    compose: Composer, jobs: Sequence[Sequence[str]], directory: Path, check_config: Callable[[Config], None]
) -> Iterator[ConfigError]:
    """Why each of the jobs that cannot be run is refused."""
    for job in jobs:
        try:
            check_config(load(declaration(compose.compose(job)), directory, job))
        except ConfigError as error:
            yield error


def _check_output(key: str, folder: Path) -> None:
    """Raises ConfigError when ``folder`` cannot be made. Nothing is left behind."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    try:
        # Only writing tells: permissions say nothing to root, and nothing about a read-only file system.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise ConfigError(f"{key}={folder}: {existing} cannot be written to ({error.strerror})") from error
