"""Carries a command line out: checks it, hands it to Hydra, and gathers the jobs' exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

import dejavu
from dejavu.cli.arguments import is_query, read_arguments
from dejavu.cli.check import check_command
from dejavu.cli.completion import bash_script, check_request
from dejavu.cli.composer import CONFIG_NAME, conf_location, prepare_hydra
from dejavu.cli.interruption import Interruption
from dejavu.cli.job import ExitCode, JobEnd, run_job, tell
from dejavu.cli.sweep import Sweep
from dejavu.clock import SystemClock
from dejavu.config import Compute, Config, WorkflowName, check_paths, validate
from dejavu.errors import ConfigError


def run_command(argv: Sequence[str], interruption: Interruption) -> int:
    """The exit code of the command line ``argv``: of a sweep, that of its worst job.

    Raises:
        KeyboardInterrupt: the user ended it.
    """
    if "--version" in argv:
        sys.stdout.write(f"dejavu {dejavu.__version__}\n")
        return ExitCode.DONE
    points: tuple[tuple[str, ...], ...] = ()
    try:
        args = read_arguments(argv)
        if args.shell_completion:
            check_request(args.overrides, os.environ)
            if (script := bash_script(args.overrides)) is not None:
                sys.stdout.write(script)
                return ExitCode.DONE
        elif not args.hydra_help:
            points = check_command(args, Path.cwd(), check_config)
    except ConfigError as error:
        tell(str(error))
        return ExitCode.WRONG_CONFIG
    return _run_hydra_jobs(args, interruption, Sweep(points))


def check_config(config: Config) -> None:
    """Raises ConfigError for a declaration that cannot be run, as far as that shows without a model or a process."""
    # Imported when needed: help, completion and most mistakes are answered without them.
    from dejavu.models.source import check as check_model
    from dejavu.workflows.preparation import check_shape_early, model_source
    from dejavu.workload import check as check_workload

    validate(config)
    if config.workflow.name is WorkflowName.apply:
        # It is another cluster's model and shape that count.
        return
    check_paths(config)
    if not config.model.is_shape:
        check_model(model_source(config.model))
    if not config.model.is_shape or config.model.compute is Compute.modelled:
        check_shape_early(config)
    check_workload(config.workload)


def _run_hydra_jobs(args: argparse.Namespace, interruption: Interruption, sweep: Sweep) -> int:
    prepare_hydra()
    ends: list[JobEnd] = []
    folders: list[Path] = []

    def job(tree: DictConfig) -> None:
        hydra = HydraConfig.get()
        is_point = hydra.mode == RunMode.MULTIRUN
        if is_point and interruption.happened:
            # Its exception was lost on the way, as it is in a destructor; Hydra's composition is full of them.
            raise KeyboardInterrupt
        end = run_job(
            tree,
            check_config,
            interrupted=lambda: interruption.happened,
            begun=sweep.begin,
            clock=SystemClock(),
        )
        ends.append(end)
        if is_point:
            folders.append(Path(hydra.runtime.cwd) / hydra.sweep.dir)
            sweep.end(end)
        if end.code is ExitCode.INTERRUPTED:
            raise KeyboardInterrupt

    try:
        _run_hydra(
            args=args,
            args_parser=get_args_parser(),
            task_function=job,
            config_path=args.config_path or conf_location(),
            config_name=args.config_name or CONFIG_NAME,
        )
    except SystemExit as ended:
        if ended.code not in (None, 0):
            return ExitCode.FAILED
    finally:
        # Also of a sweep that was interrupted: its points until then.
        if folders:
            sweep.close(folders[0])
    if not ends and not is_query(args):
        return ExitCode.FAILED
    return max((end.code for end in ends), key=ExitCode.severity, default=ExitCode.DONE)
