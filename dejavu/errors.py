"""Every error this system raises on purpose. Who can mend it decides the class."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DejavuError(Exception):
    """Anything that this system raises on purpose."""


class ConfigError(DejavuError):
    """The user's declaration is wrong and the user can mend it. Exit code 2.

    The message has at most three lines: the key or path, the value, and the limit or the nearest valid names.
    """


class InfeasibleError(DejavuError):
    """The declaration is well formed but cannot be met (memory, layers, workers). Exit code 3."""


class Retryable(DejavuError):
    """The outcome is unknown or the failure may pass; the caller may try again."""


class Fatal(DejavuError):
    """This process cannot go on."""


class InvalidTransition(DejavuError):
    """A state machine got an event that its state does not allow; the message tells the story so far."""


def nearest(value: str, valid: Iterable[str], *, most: int = 3) -> str:
    """A hint such as ``did you mean 'cluster'?``, or the list of valid names where nothing is near."""
    names = sorted(valid)
    close = difflib.get_close_matches(value, names, n=most, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(name) for name in close) + "?"
    return "valid: " + ", ".join(names)
