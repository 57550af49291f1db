"""Whether a number lies where it must, and the error that names key, value and limit where it does not."""

from __future__ import annotations

import math

from dejavu.errors import ConfigError

_MOST_SEED = 2**63 - 1


def refuse(key: str, value: object, reason: str) -> ConfigError:
    """The error that says what is wrong with the value of a key."""
    return ConfigError(f"{key}={'null' if value is None else value}: {reason}")


def at_least(key: str, value: float | None, limit: float, unit: str = "") -> None:
    """Raises ConfigError for a number below ``limit`` or not finite; None passes."""
    if value is None:
        return
    if not math.isfinite(value) or value < limit:
        raise refuse(key, value, f"must be at least {limit:g}{unit}")


def above_zero(key: str, value: float | None, unit: str = "") -> None:
    """Raises ConfigError for a number that is not above 0 and finite; None passes."""
    if value is None:
        return
    if not math.isfinite(value) or value <= 0:
        raise refuse(key, value, f"must be more than 0{unit}")


def check_seed(key: str, seed: int) -> None:
    """Raises ConfigError for a seed that no generator takes."""
    if not 0 <= seed <= _MOST_SEED:
        raise refuse(key, seed, f"must be from 0 to {_MOST_SEED}")
