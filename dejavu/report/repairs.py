"""A repair as ``metrics.json`` tells it, and as a line for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from dejavu.report.amounts import show_count, show_seconds

PARTS = ("detection_s", "fence_s", "replace_s", "restore_s", "resume_s")
"""The parts of a repair's pause, one after the other."""
_PART_NAMES = {
    "detection_s": "detected in",
    "fence_s": "fence",
    "replace_s": "replace",
    "restore_s": "restore",
    "resume_s": "resume",
}


class FailureReceipt(TypedDict):
    """One worker that was declared dead."""

    worker: str
    cause: str
    reason: str


class RepairReceipt(TypedDict):
    """An entry of ``repairs`` in ``metrics.json``; docs/metrics.md explains each field. None: not known or not done."""

    number: int
    epoch: int
    phase: str
    failures: list[FailureReceipt]
    how: dict[str, str]
    replaced_by: dict[str, str]
    detection_s: float | None
    fence_s: float | None
    replace_s: float | None
    restore_s: float | None
    resume_s: float | None
    total_s: float | None
    resume_steps: dict[int, int]
    steps_recomputed: dict[int, int]
    rows: dict[str, int]
    tier: str | None
    bytes_restored: int
    bytes_replicated: int
    problem: str | None


def repair_line(receipt: RepairReceipt) -> str:
    """What failed, how long the pause was and of what parts, where generation went on, and from what."""
    return "; ".join(part for part in (_failed(receipt), _pause(receipt), _resumed(receipt)) if part)


def _failed(receipt: RepairReceipt) -> str:
    if not receipt["failures"]:
        return "nothing failed"
    return ", ".join(_failure(receipt, failure) for failure in receipt["failures"])


def _failure(receipt: RepairReceipt, failure: FailureReceipt) -> str:
    worker = failure["worker"]
    how = receipt["how"].get(worker)
    if how == "links":
        return f"{worker} lost a link ({failure['reason']})"
    told = f"{worker} {failure['reason']}"
    by = receipt["replaced_by"].get(worker)
    if how == "standby" and by is not None:
        return f"{told}, standby {by} took its place"
    if how == "process":
        return f"{told}, a new process took its place"
    return f"{told}, the others took its layers" if how == "replan" else told


def _pause(receipt: RepairReceipt) -> str:
    if receipt["problem"] is not None:
        return f"given up: {receipt['problem']}"
    if receipt["total_s"] is None:
        return f"not finished (phase {receipt['phase']})"
    values: Mapping[str, object] = receipt
    parts = []
    for part in PARTS:
        value = values[part]
        if isinstance(value, float | int):
            parts.append(f"{_PART_NAMES[part]} {show_seconds(max(value, 0.0))}")
    return f"pause {show_seconds(receipt['total_s'])} ({', '.join(parts)})"


def _resumed(receipt: RepairReceipt) -> str:
    if receipt["total_s"] is None:
        return ""
    if not receipt["rows"]:
        return "no request was open"
    steps = sorted(set(receipt["resume_steps"].values()))
    at = ""
    if steps:
        span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        again = sum(receipt["steps_recomputed"].values())
        at = f"resumed at {span}" + (f", {show_count(again, 'step')} made again" if again else "") + "; "
    rows = ", ".join(f"{show_count(number, 'row')} from {_SOURCES.get(tier, tier)}" for tier, number in _tiers(receipt))
    return at + rows


def _tiers(receipt: RepairReceipt) -> list[tuple[str, int]]:
    return [(tier, number) for tier, number in receipt["rows"].items() if number]


_SOURCES = {"replica": "replicas", "recompute": "prompt and tokens", "restart": "the prompt again"}
