"""Who is there: which workers serve, and which have been away for too long."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from dejavu.control.member import Member
from dejavu.control.plan import Plan
from dejavu.ids import IncarnationId, WorkerName
from operators.observation import Observed

CONFIRM_LOOKS_S = 0.3
"""A lease that is gone is gone; the second look only keeps a key that is being put again from looking like an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """The workers that have registered and are not dead, and since when some are missed (monotonic seconds)."""

    seen: Mapping[WorkerName, Member] = field(default_factory=dict)
    """By their last registration."""
    missing_since_s: Mapping[WorkerName, float] = field(default_factory=dict)
    shaken_until_s: float = float("-inf")
    """Until then the store itself is under suspicion: it was wiped or restarted, and everybody registers again."""
    losses: int = 0

    def limit_s(self, now_s: float, patience_s: float) -> float:
        """How long a worker may be missing now before it is dead."""
        return patience_s if now_s < self.shaken_until_s else CONFIRM_LOOKS_S


def attend(
    before: Attendance,
    observed: Observed,
    now_s: float,
    *,
    names: Collection[WorkerName],
    gone: frozenset[IncarnationId],
    patience_s: float,
) -> Attendance:
    """The attendance of these workers after this look.

    A store that cannot be read says nothing: absence is only counted when seen. What an incarnation of ``gone`` still
    registers is not looked at. When this controller's own key or lease was lost, or more than half of the workers
    vanish at once, it is the store that failed, and absence is given ``patience_s`` seconds.
    """
    known = _counted(before.seen, names, gone)
    if observed.members is None:
        return Attendance(seen=known, shaken_until_s=before.shaken_until_s, losses=before.losses)
    present = _counted(observed.members, names, gone)
    missing = {name: before.missing_since_s.get(name, now_s) for name in sorted(known) if name not in present}
    vanished = missing.keys() - before.missing_since_s.keys()
    is_shaken = (
        not observed.own_key_present
        or observed.losses > before.losses
        or (len(vanished) > 1 and 2 * (len(known) - len(missing)) < len(known))
    )
    return Attendance(
        seen=known | present,
        missing_since_s=missing,
        shaken_until_s=now_s + patience_s if is_shaken else before.shaken_until_s,
        losses=observed.losses,
    )


def without(attendance: Attendance, names: Collection[WorkerName]) -> Attendance:
    """The attendance with these workers as if they had never registered."""
    return replace(
        attendance,
        seen={name: member for name, member in attendance.seen.items() if name not in names},
        missing_since_s={name: at_s for name, at_s in attendance.missing_since_s.items() if name not in names},
    )


def _counted(
    members: Mapping[WorkerName, Member], names: Collection[WorkerName], gone: frozenset[IncarnationId]
) -> dict[WorkerName, Member]:
    return {name: member for name, member in members.items() if name in names and member.incarnation not in gone}


def serves(plan: Plan, name: WorkerName, attendance: Attendance) -> bool:
    """True when the worker is linked in this epoch and takes work."""
    member = attendance.seen.get(name)
    present = member is not None and name not in attendance.missing_since_s
    return present and member is not None and member.state == "serving" and member.epoch == plan.epoch


def waits(name: WorkerName, attendance: Attendance) -> bool:
    """True when the worker is loaded and has no place."""
    member = attendance.seen.get(name)
    present = member is not None and name not in attendance.missing_since_s
    return present and member is not None and member.state == "ready" and member.pipeline is None


def all_serving(plan: Plan, attendance: Attendance) -> bool:
    """True when every worker that has a place serves in the plan's epoch."""
    return all(serves(plan, name, attendance) for name in plan.workers)
