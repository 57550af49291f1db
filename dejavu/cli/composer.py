"""Composes declarations the way ``hydra.main`` will, but without its way of ending the process on an error."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra import version
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from dejavu.cli.explain import explain
from dejavu.config import register_schema
from dejavu.errors import ConfigError

CONFIG_NAME = "config"
JOB_NAME = "run"
VERSION_BASE = "1.3"


def conf_location() -> str:
    """Where the values lie: the package ``dejavu.conf`` of an installed program, or the checkout's folder ``conf``."""
    if importlib.util.find_spec("dejavu.conf") is not None:
        return "pkg://dejavu.conf"
    return str(Path(__file__).resolve().parents[2] / "conf")


def prepare_hydra() -> None:
    """Hydra knows the schema and which of its behaviours is meant. Idempotent."""
    version.setbase(VERSION_BASE)
    register_schema()


class Composer:
    """Hydra's composition, with errors that a person can act on. Made by ``composer``."""

    def __init__(self, search_path: ConfigSearchPath, config_name: str) -> None:
        self._hydra = Hydra.create_main_hydra2(task_name=JOB_NAME, config_search_path=search_path)
        self._repository = ConfigRepository(config_search_path=search_path)
        self._config_name = config_name

    def compose(self, overrides: Sequence[str], *, multirun: bool = False) -> DictConfig:
        """The whole tree, with the ``hydra`` node. Raises ConfigError.

        Args:
            overrides: as on the command line.
            multirun: values may be sweeps; they are left out of the tree.
        """
        with explain():
            return self._hydra.compose_config(
                config_name=self._config_name,
                overrides=list(overrides),
                run_mode=RunMode.MULTIRUN if multirun else RunMode.RUN,
            )

    def options(self) -> dict[str, list[str]]:
        """The options of every group, Hydra's own groups among them."""
        # Hydra's own listing copies every loaded file once a group, which takes longer than all the rest.
        return dict(_options(self._repository, ""))


def _options(repository: ConfigRepository, parent: str) -> Iterator[tuple[str, list[str]]]:
    """Groups below ``parent`` that have options, with them."""
    for name in repository.get_group_options(parent, ObjectType.GROUP):
        group = f"{parent}/{name}" if parent else name
        options = repository.get_group_options(group, ObjectType.CONFIG)
        if options:
            yield group, options
        yield from _options(repository, group)


@contextmanager
def composer(args: argparse.Namespace) -> Iterator[Composer]:
    """A Composer that looks where the command line says. Raises ConfigError where --config-dir is no folder."""
    prepare_hydra()
    search_path = create_config_search_path(args.config_path or conf_location())
    if args.config_dir is not None:
        folder = Path(args.config_dir).absolute()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir={args.config_dir}: no such folder")
        # The place that Hydra itself gives it.
        search_path.prepend(provider="command-line", path=f"file://{folder}", anchor=SearchPathQuery(provider="schema"))
    GlobalHydra.instance().clear()
    try:
        yield Composer(search_path, args.config_name or CONFIG_NAME)
    finally:
        GlobalHydra.instance().clear()


def declaration(tree: DictConfig) -> DictConfig:
    """``tree`` without its ``hydra`` node, whose interpolations still resolve. ``tree`` loses the node too."""
    HydraConfig.instance().set_config(tree)
    with open_dict(tree):
        del tree["hydra"]
    return tree


def sweep_jobs(tree: DictConfig, overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each job of a sweep as Hydra's basic sweeper makes them.

    Args:
        tree: composed for the sweep; its ``hydra.sweeper.params`` join in.
        overrides: as on the command line.
    """
    params = OmegaConf.select(tree, "hydra.sweeper.params") or {}
    parser = OverridesParser.create()
    with explain():
        parsed = parser.parse_overrides([f"{key}={value}" for key, value in params.items()] + list(overrides))
        hydra_overrides = [override.input_line or "" for override in parsed if override.is_hydra_override()]
        task_overrides = [override for override in parsed if not override.is_hydra_override()]
        batches = BasicSweeper.split_arguments(task_overrides, None)
    # A job is composed as a single run, whatever an experiment says of the mode.
    return [[*hydra_overrides, *job] for job in itertools.chain.from_iterable(batches)]
