"""Who is there: which workers serve, and which have been away for too long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dejavu.ids import WorkerName
from operators.actions import Action, FailRun
from operators.observation import Observed


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """When each registered worker was first missed, in seconds of the operator's clock."""

    seen: frozenset[WorkerName] = frozenset()
    missing_since_s: Mapping[WorkerName, float] = field(default_factory=dict)


def attend(before: Attendance, observed: Observed, now_s: float) -> Attendance:
    """The attendance after this look. A store that cannot be read says nothing: absence is only counted when seen."""
    if observed.members is None:
        return Attendance(seen=before.seen)
    seen = before.seen | frozenset(observed.members)
    missing = {name: before.missing_since_s.get(name, now_s) for name in sorted(seen) if name not in observed.members}
    return Attendance(seen=seen, missing_since_s=missing)


def decide(
    desired: Iterable[WorkerName], attendance: Attendance, observed: Observed, *, now_s: float, patience_s: float
) -> tuple[Action, ...]:
    """Fail on a worker that says it cannot go on, or whose lease has been gone for ``patience_s`` seconds.

    The patience covers a store that was wiped or restarted: workers then register again by themselves.
    """
    wanted = frozenset(desired)
    actions: list[Action] = [
        FailRun(reason=f"worker {member.name} cannot go on: {member.problem}", worker=member.name)
        for member in (observed.members or {}).values()
        if member.problem is not None and member.name in wanted
    ]
    for name, since_s in attendance.missing_since_s.items():
        if name in wanted and now_s - since_s > patience_s:
            actions.append(
                FailRun(
                    reason=f"worker {name} has not renewed its lease for {now_s - since_s:.1f} s "
                    "(frozen, or cut off from the store)",
                    worker=name,
                )
            )
    return tuple(actions)


def all_serving(desired: Iterable[WorkerName], observed: Observed) -> bool:
    """True when every desired worker is linked and takes work."""
    members = observed.members or {}
    return all(name in members and members[name].state == "serving" for name in desired)
