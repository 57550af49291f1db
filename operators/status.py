"""The conditions that people read: Ready, Degraded, Repairing, each with a reason and since when."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dejavu.ids import WorkerName
from operators.actions import Action, PutStatus
from operators.membership import all_serving
from operators.observation import Observed


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """One condition. ``since_s`` is wall-clock time of its last change."""

    status: bool
    reason: str
    since_s: float


Conditions = dict[str, Condition]


def conditions(desired: Iterable[WorkerName], observed: Observed, before: Conditions, now_s: float) -> Conditions:
    """The conditions now; one that has not changed keeps its time. An unreadable store leaves all as they were."""
    if observed.members is None:
        return before
    wanted = tuple(desired)
    absent = [name for name in wanted if name not in observed.members]
    others = [
        f"{name} is {observed.members[name].state}"
        for name in wanted
        if name in observed.members and observed.members[name].state != "serving"
    ]
    ready = all_serving(wanted, observed)
    was_ready = "Ready" in before and before["Ready"].status
    seen_ready = was_ready or ("Degraded" in before and before["Degraded"].reason != "starting")
    reason = "; ".join([f"no worker {', '.join(absent)}"] * bool(absent) + others) or "all workers serve"
    degraded = not ready and seen_ready
    return {
        "Ready": _condition("Ready", ready, reason, before, now_s),
        "Degraded": _condition(
            "Degraded", degraded, reason if degraded else ("none" if ready or seen_ready else "starting"), before, now_s
        ),
        "Repairing": _condition("Repairing", False, "none", before, now_s),
    }


def decide(before: Conditions, after: Conditions) -> tuple[Action, ...]:
    """Put the conditions when one has changed."""
    return () if before == after else (PutStatus(value=msgspec.json.encode(after)),)


def _condition(name: str, status: bool, reason: str, before: Conditions, now_s: float) -> Condition:
    old = before.get(name)
    same = old is not None and old.status == status and old.reason == reason
    return old if same and old is not None else Condition(status=status, reason=reason, since_s=now_s)
