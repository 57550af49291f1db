"""Each override of the command line, checked by itself before anything is composed.

Hydra's own answer to a misspelt key is the advice to add it with a plus; ours names the nearest key that exists.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from dejavu.cli.explain import field_names, shorten
from dejavu.config import Config
from dejavu.errors import ConfigError, nearest

FREE_MAPPING = "transport.settings."


def normalise(overrides: Sequence[str]) -> list[str]:
    """The overrides in Hydra's form.

    A key of a free mapping gets the plus that Hydra wants for a new key; ``experiment=null``, which Hydra refuses
    although it is the default, goes.
    """
    return [f"++{text}" if text.startswith(FREE_MAPPING) else text for text in overrides if text != "experiment=null"]


def check_overrides(
    overrides: Sequence[str], default_tree: Callable[[], DictConfig], options: Mapping[str, Sequence[str]]
) -> list[Override]:
    """The overrides, parsed; every one names something that exists and has a value that fits.

    Args:
        overrides: as ``normalise`` leaves them; sweeps are checked value by value.
        default_tree: composes the default declaration with the ``hydra`` node; called where Hydra's keys are used.
        options: the options of every group.

    Raises:
        ConfigError: naming the override at fault and the nearest valid names.
    """
    schema = OmegaConf.structured(Config)
    parsed = [_parse(text, schema, options) for text in overrides]
    for override in parsed:
        key = override.key_or_group
        if not key:
            raise ConfigError(f"{override.input_line}: expected group=option or group.key=value")
        if key in options:
            _check_group(override, options[key])
        elif key == "hydra" or key.startswith(("hydra.", "hydra/")):
            _check_key(override, default_tree(), options)
        else:
            _check_key(override, schema, options)
            _check_value(override)
    return parsed


def _parse(text: str, schema: DictConfig, options: Mapping[str, Sequence[str]]) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        key = text.lstrip("+~").split("=")[0]
        if "=" not in text and key in _leaves(schema):
            raise ConfigError(f"{text}: has no value; write {key}=VALUE") from error
        if "=" not in text:
            raise ConfigError(
                f"{text}: expected group=option or group.key=value\n{_known(key, schema, options)}"
            ) from error
        raise ConfigError(
            f"{text}: the value of {key} cannot be read\n"
            f"quote a value with special characters, for the shell and for Hydra: '{key}=\"...\"'"
        ) from error


def _known(key: str, schema: DictConfig, options: Mapping[str, Sequence[str]]) -> str:
    """A hint for a key of which nothing else is known."""
    if key in options:
        return f"for example {key}={options[key][0]}"
    return nearest(key, [*_groups(options), *_leaves(schema)]) if "." in key else nearest(key, _groups(options))


def _check_group(override: Override, valid: Sequence[str]) -> None:
    group = override.key_or_group
    if override.package is not None:
        raise ConfigError(f"{override.input_line}: groups have fixed places here; leave '@{override.package}' out")
    if override.is_add() or override.is_force_add() or override.is_delete():
        raise ConfigError(
            f"{override.input_line}: an option is chosen, not added or removed\n"
            f"write {group}=OPTION; valid: {', '.join(sorted(valid))}"
        )
    for option in _values(override):
        if not isinstance(option, str) or option not in valid:
            raise ConfigError(f"{group}={_shown(option)}: no such option\n{nearest(_shown(option), valid)}")


def _check_key(override: Override, tree: DictConfig, options: Mapping[str, Sequence[str]]) -> None:
    """Raises ConfigError unless the key exists, or is new in a mapping that takes any key."""
    key = override.key_or_group
    text = override.input_line
    if override.package is not None or "/" in key:
        raise ConfigError(f"{text}: no such group\n{nearest(key, _groups(options, hydra=key.startswith('hydra')))}")
    node: object = tree
    parts = key.split(".")
    for index, part in enumerate(parts):
        if not isinstance(node, DictConfig) or node._is_none() or part not in node:
            if _takes_any_key(node) and index == len(parts) - 1 and (override.is_add() or override.is_force_add()):
                return
            what = "key" if index else "group or key"
            raise ConfigError(f"{key}: no such {what}\n{_nearest_key(parts, index, node, tree, options)}")
        node = node._get_node(part)
    if override.is_delete():
        raise ConfigError(f"{text}: a key cannot be removed\nset it instead: {key}=VALUE")
    if (override.is_add() or override.is_force_add()) and not key.startswith(FREE_MAPPING):
        raise ConfigError(f"{text}: {key} exists already\nwrite {key}=VALUE, without '+'")


def _takes_any_key(node: object) -> bool:
    """True for a mapping whose keys no schema names, such as ``hydra.job.env_set``."""
    return isinstance(node, DictConfig) and node._key() is not None and OmegaConf.get_type(node) in (dict, None)


def _nearest_key(
    parts: list[str], index: int, node: object, tree: DictConfig, options: Mapping[str, Sequence[str]]
) -> str:
    """The names beside the wrong one that are near; else where that last name does exist; else all beside it."""
    if not isinstance(node, DictConfig) or node._is_none():
        return f"{'.'.join(parts[:index])} has no keys of its own"
    beside = [str(name) for name in node] if index else _groups(options)
    prefix = "".join(f"{part}." for part in parts[:index])
    near = [prefix + name for name in difflib.get_close_matches(parts[index], beside, n=3)]
    same_name = [leaf for leaf in _leaves(tree) if leaf.split(".")[-1] == parts[-1]] if parts[0] != "hydra" else []
    suggestions = same_name or near if index == 0 else near or same_name
    return _did_you_mean(suggestions[:3]) if suggestions else nearest(parts[index], beside)


def _did_you_mean(names: Sequence[str]) -> str:
    return "did you mean " + " or ".join(repr(name) for name in names) + "?"


def _check_value(override: Override) -> None:
    """Raises ConfigError when the schema refuses the value."""
    key = override.key_or_group
    for value in _values(override):
        try:
            OmegaConf.update(OmegaConf.structured(Config), key, value)
        except OmegaConfBaseException as error:
            if isinstance(error, ConfigKeyError):
                hint = nearest(str(error.key), field_names(error.object_type))
                raise ConfigError(f"{key}={_shown(value)}: {error.key}: no such key\n{hint}") from error
            reason = shorten(str(error)).splitlines()[0]
            hint = f"\na list is written [a,b]: {key}=[{value}]" if "ListConfig" in reason else ""
            raise ConfigError(f"{key}={_shown(value)}: {_plain(reason)}{hint}") from error


def _values(override: Override) -> list[object]:
    """The value, or each value of a sweep."""
    if override.is_sweep_override():
        return list(override.sweep_iterator()) if override.is_discrete_sweep() else []
    return [override.value()]


def _plain(reason: str) -> str:
    """OmegaConf's reason without its class names."""
    if "ListConfig" in reason:
        return "a list is needed"
    for kind, words in (
        ("Integer", "a whole number is needed"),
        ("Float", "a number is needed"),
        ("bool", "true or false is needed"),
    ):
        if f"converted to {kind}" in reason or f"not a valid {kind}" in reason:
            return words
    if "is not a subclass of" in reason:
        return "a mapping {key: value, ...} is needed"
    if "expected one of [" in reason:
        return "valid: " + reason.partition("expected one of [")[2].rstrip("]")
    return reason


def _shown(value: object) -> str:
    return "null" if value is None else str(value)


def _groups(options: Mapping[str, Sequence[str]], *, hydra: bool = False) -> list[str]:
    return sorted(group for group in options if (group.split("/")[0] == "hydra") == hydra)


def _leaves(tree: DictConfig, prefix: str = "") -> list[str]:
    """Dotted keys of the declaration, Hydra's own left out."""
    found: list[str] = []
    for name in map(str, tree):
        node = tree._get_node(name)
        key = prefix + name
        if key == "hydra":
            continue
        if isinstance(node, DictConfig) and not node._is_none() and len(node):
            found += _leaves(node, f"{key}.")
        else:
            found.append(key)
    return found
