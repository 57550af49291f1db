"""The flags of the command line, read by Hydra's own parser without its way of ending the process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hydra._internal.utils import get_args_parser

from dejavu.errors import ConfigError, nearest


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Flags and overrides of ``argv``, in any order.

    Raises:
        ConfigError: an unknown flag, a flag without its value, or flags that exclude each other.
    """
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        args, unknown = parser.parse_known_intermixed_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        raise ConfigError(f"{unknown[0]}: no such flag\n{_nearest_flag(unknown[0], flags)}")
    _check_combination(args)
    return args


def is_query(args: argparse.Namespace) -> bool:
    """True when the command asks something and runs nothing."""
    return bool(args.help or args.hydra_help or args.cfg or args.info or args.shell_completion)


def _nearest_flag(flag: str, flags: list[str]) -> str:
    hint = nearest(flag.split("=")[0], [known for known in flags if known.startswith("--")])
    return hint if hint.startswith("did") else "see --help"


def _check_combination(args: argparse.Namespace) -> None:
    """Raises ConfigError where Hydra would raise a ValueError."""
    if args.experimental_rerun is not None:
        raise ConfigError("--experimental-rerun is not supported: it would run a pickled file")
    chosen = [
        flag
        for flag, given in (
            ("--run", args.run),
            ("--multirun", args.multirun),
            ("--cfg", args.cfg),
            ("--info", args.info),
            ("--shell-completion", args.shell_completion),
        )
        if given
    ]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} exclude each other")
    if args.resolve and not (args.cfg or args.help):
        raise ConfigError("--resolve goes with --cfg or --help")
