"""Hydra's and OmegaConf's errors, turned into ours: the key, the value, the nearest valid names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager

import yaml  # type: ignore[import-untyped]
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from dejavu.errors import ConfigError, nearest

MOST_LINES = 3
_SWEEP = re.compile(r"(?:Ambiguous value for argument|Sweep parameters) '(.*?)'")
_SOURCE = re.compile(r"In '([^']+)':")


@contextmanager
def explain() -> Iterator[None]:
    """Errors of Hydra and OmegaConf leave as ConfigError of at most three lines."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{' '.join(str(error.problem_mark).split())}: is not YAML ({error.problem})") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explanation(error)) from error


def explanation(error: Exception) -> str:
    """What is wrong, for a person, in at most three lines."""
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read as key=value\nquote values with special characters: 'key=\"...\"'"
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    sweep = _SWEEP.search(str(error))
    if sweep is not None:
        return f"{sweep.group(1)}: several values make a sweep\nadd -m for one job each; a list is [a,b]"
    cause = _cause(error)
    if cause is not None:
        source = _SOURCE.search(str(error))
        return (f"in {source.group(1)}.yaml: " if source else "") + _wrong_value(cause)
    return shorten(str(error))


def shorten(message: str) -> str:
    """The first lines of ``message``, without Hydra's advice to add a key or to ask for a traceback."""
    advice = (
        "To append to your config",
        "Set the environment variable",
        "Config search path",
        "full_key",
        "object_type",
    )
    lines = [" ".join(line.split()) for line in message.splitlines()]
    return "\n".join([line for line in lines if line and not line.startswith(advice)][:MOST_LINES])


def _cause(error: BaseException) -> OmegaConfBaseException | None:
    """OmegaConf's error behind Hydra's, which does not always say that it is the cause."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OmegaConfBaseException):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def _missing_option(error: MissingConfigException) -> str:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    source = _SOURCE.search(str(error))
    # Hydra blames the main file for an option that an experiment has put in its place.
    place = f"in {source.group(1)}.yaml: " if source and source.group(1) != "config" else ""
    if group and error.options:
        return f"{place}{group}={option}: no such option\n{nearest(option, error.options)}"
    return place + shorten(str(error).replace(source.group(0), "").strip() if source else str(error))


def _wrong_value(error: OmegaConfBaseException) -> str:
    key = error.full_key or error.key or "?"
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        hint = nearest(str(error.key), field_names(error.object_type))
        return f"{key}: no such key\n{hint}"
    return f"{key}: {shorten(str(error)).splitlines()[0]}"


def field_names(schema: object) -> list[str]:
    """Keys of a schema class; empty for anything else."""
    return (
        [field.name for field in dataclasses.fields(schema)]
        if isinstance(schema, type) and dataclasses.is_dataclass(schema)
        else []
    )
