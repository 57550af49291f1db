"""The conditions that people read: Ready, Degraded, Repairing, each with a reason and since when."""

from __future__ import annotations

import msgspec

from operators import changes, journals
from operators.actions import Action, PutStatus
from operators.membership import serves
from operators.observation import Observed
from operators.repair_state import RepairState


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """One condition. ``since_s`` is wall-clock time of its last change."""

    status: bool
    reason: str
    since_s: float


Conditions = dict[str, Condition]


def conditions(state: RepairState, observed: Observed, before: Conditions, now_s: float) -> Conditions:
    """The conditions now; one that has not changed keeps its time.

    A repair or the end of the run speaks for itself; otherwise an unreadable store leaves all as they were.
    """
    if state.problem is not None:
        return _made(before, now_s, ready=(False, state.problem), degraded=(True, state.problem))
    if state.journal is not None:
        reason = journals.headline(state.journal)
        return _made(before, now_s, ready=(False, reason), degraded=(True, reason), repairing=(True, reason))
    if observed.members is None:
        return before
    if state.change is not None:
        return _made(before, now_s, ready=(False, changes.headline(state.change)), degraded=(False, "none"))
    out = _not_serving(state)
    if not out:
        return _made(before, now_s, ready=(True, "all workers serve"), degraded=(False, "none"))
    degraded = (True, out) if state.has_served else (False, "starting")
    return _made(before, now_s, ready=(False, out), degraded=degraded)


def decide(before: Conditions, after: Conditions) -> tuple[Action, ...]:
    """Put the conditions when one has changed."""
    return () if before == after else (PutStatus(value=msgspec.json.encode(after)),)


def _not_serving(state: RepairState) -> str:
    """Who does not serve, in words; nothing when all do."""
    attendance = state.attendance
    out = [name for name in state.plan.workers if not serves(state.plan, name, attendance)]
    present = [name for name in out if name in attendance.seen and name not in attendance.missing_since_s]
    absent = [name for name in out if name not in present]
    parts = [f"no worker {', '.join(absent)}"] * bool(absent)
    for name in present:
        member = attendance.seen[name]
        old = f" in epoch {member.epoch}" if member.state == "serving" else ""
        parts.append(f"{name} is {member.state}{old}")
    return "; ".join(parts)


def _made(
    before: Conditions,
    now_s: float,
    *,
    ready: tuple[bool, str],
    degraded: tuple[bool, str],
    repairing: tuple[bool, str] = (False, "none"),
) -> Conditions:
    now = {"Ready": ready, "Degraded": degraded, "Repairing": repairing}
    return {name: _condition(name, *value, before, now_s) for name, value in now.items()}


def _condition(name: str, status: bool, reason: str, before: Conditions, now_s: float) -> Condition:
    old = before.get(name)
    if old is not None and old.status == status and old.reason == reason:
        return old
    return Condition(status=status, reason=reason, since_s=now_s)
