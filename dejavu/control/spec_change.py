"""A change of a running cluster's declared state, as it is told: ``/dejavu/<cluster>/changes/<revision>``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from dejavu.control.journal import RestoreReceipt
from dejavu.ids import Epoch

ChangePhase = Literal["form", "restore", "done", "refused", "failed"]
"""Workers go over to the new plan; its rows go on; it is in force; the cluster goes on as it was; the run has ended."""

Difference = tuple[object, object]
"""The value before, and the one that is asked for."""


class SpecChange(msgspec.Struct, frozen=True, kw_only=True):
    """One change. Times are wall-clock seconds since the Unix epoch."""

    revision: int
    """Of the declared state that asks for it."""
    differences: dict[str, Difference] = {}
    """By key, such as ``strategy.in_flight``."""
    phase: ChangePhase = "form"
    asked_s: float
    """When the operator took it up."""
    epoch: Epoch | None = None
    """Of the plan that answers it; None where no plan had to."""
    fenced_s: float | None = None
    """When that plan was in the store: nothing of the former epoch is taken any more."""
    formed_s: float | None = None
    """When every worker served in it."""
    receipt: RestoreReceipt | None = None
    """How the rows go on."""
    reason: str | None = None
    """Why it was refused, or has failed."""
    is_infeasible: bool = False
    """Whether it was refused because it cannot be met, and not because it makes no sense."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.phase in ("done", "refused", "failed")

    @property
    def text(self) -> str:
        """What is to be changed, in words."""
        parts = [f"{key} {shown(before)} → {shown(after)}" for key, (before, after) in self.differences.items()]
        return ", ".join(parts) or "nothing"


def shown(value: object) -> str:
    """A value as it is written on a command line."""
    return "null" if value is None else str(value)


def differences(before: object, after: object) -> dict[str, Difference]:
    """The keys whose values differ between two decoded JSON objects, in the order of the second; lists are values."""
    old, new = dict(_leaves(before, "")), dict(_leaves(after, ""))
    keys = [*new, *(key for key in old if key not in new)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def why_fixed(key: str, live: Mapping[str, object]) -> str | None:
    """Why the key cannot change while the cluster runs; None for one of ``live``, which can."""
    if key in live:
        return None
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        reason = _FIXED.get(".".join(parts[:length]))
        if reason is not None:
            return reason
    return "it is no part of a cluster's declared state"


_LAYERS = "who computes which layers is decided at the start, and by repairs"
_COPIES = "copies have had their place there since the start"
_FIXED: Mapping[str, str] = {
    "cluster": "workers and controller took it over when they started",
    "model": "the workers have loaded this model, and the rows' KV is of it",
    "transport": "workers and controller set up their links with it when they started",
    "strategy": "is decided at the start",
    "strategy.mode": _LAYERS,
    "strategy.split": _LAYERS,
    "strategy.stages": _LAYERS,
    "strategy.layers": _LAYERS,
    "strategy.scheduling": "rows are grouped by it from their first prompt on",
    "strategy.stream_to": _COPIES,
    "strategy.stream_folder": _COPIES,
    "strategy.swapping": "where rows lie is decided at the start",
    "strategy.may_grow": "the operator took it over when it started",
}


def _leaves(value: object, prefix: str) -> Iterator[tuple[str, object]]:
    if not isinstance(value, dict):
        yield prefix, value
        return
    for key, below in value.items():
        yield from _leaves(below, f"{prefix}.{key}" if prefix else str(key))
