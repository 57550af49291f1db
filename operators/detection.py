"""Which workers have failed, and how that is known: an exit, a lease, a link, or the worker's own word. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dejavu.control.journal import Cause, Failure
from dejavu.control.member import Member
from dejavu.control.plan import Plan
from dejavu.ids import Epoch, WorkerName
from operators.membership import Attendance, serves
from operators.observation import Moment, Observed

ProcessKey = tuple[WorkerName, int]
"""One process of a worker: its name and its pid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """Somebody lost its link to a worker: an exit or the end of a lease should follow."""

    worker: WorkerName
    epoch: Epoch
    reason: str
    by: str
    since_s: float
    """Monotonic time."""


def failures(
    names: Iterable[WorkerName],
    before: Attendance,
    after: Attendance,
    observed: Observed,
    now: Moment,
    *,
    handled: frozenset[ProcessKey],
    patience_s: float,
) -> tuple[Failure, ...]:
    """What this look shows of these workers, at most one failure each: what is surest, in the order of the names."""
    exits = _exits(before, after, observed, now, handled)
    found: list[Failure] = []
    for name in names:
        if name in exits:
            found.append(exits[name])
        elif (member := after.seen.get(name)) is not None:
            failure = (
                _problem(member, now)
                or _started_again(before.seen.get(name), member, now)
                or _lease(member, after, now, patience_s)
            )
            found += [] if failure is None else [failure]
    return tuple(found)


def late(
    plan: Plan, attendance: Attendance, since_s: Mapping[WorkerName, float], now: Moment, *, timeout_s: float
) -> tuple[Failure, ...]:
    """The workers to blame for an epoch in which not all serve ``timeout_s`` seconds after ``since_s``.

    A worker waits for its peers to be ready, so those that are not ready themselves are to blame, if there are any.
    """
    out = [name for name in plan.workers if not serves(plan, name, attendance)]
    late_ones = [name for name in out if now.monotonic_s - since_s[name] > timeout_s]
    members = {name: attendance.seen.get(name) for name in out}
    unready = [name for name in late_ones if (member := members[name]) is None or member.epoch != plan.epoch]
    # While one that may still come in time is not ready, those that wait for it are not to blame.
    waiting = any(name not in late_ones for name in out)
    blamed = unready or ([] if waiting else late_ones)
    return tuple(
        _failure(name, members[name], "problem", f"did not serve in {timeout_s:g} s", now, since_s=None)
        for name in blamed
    )


def broken_link(
    suspicions: Mapping[WorkerName, Suspicion], attendance: Attendance, now: Moment, *, confirm_s: float
) -> tuple[Failure, ...]:
    """The first suspicion that neither an exit nor the end of a lease has explained within ``confirm_s`` seconds.

    One at a time: a link has two ends, and each suspects the other.
    """
    for suspicion in suspicions.values():
        member = attendance.seen.get(suspicion.worker)
        is_due = now.monotonic_s - suspicion.since_s >= confirm_s
        if member is not None and is_due and suspicion.worker not in attendance.missing_since_s:
            reason = f"lost its link: {suspicion.reason} (says {suspicion.by})"
            return (_failure(member.name, member, "link", reason, now, since_s=now.ago(suspicion.since_s)),)
    return ()


def _exits(
    before: Attendance, after: Attendance, observed: Observed, now: Moment, handled: frozenset[ProcessKey]
) -> dict[WorkerName, Failure]:
    """The ends of newest processes that were not handled before."""
    found: dict[WorkerName, Failure] = {}
    for gone in observed.exits:
        if (gone.name, gone.pid) in handled or observed.pids.get(gone.name, gone.pid) != gone.pid:
            continue
        # Somebody may have started the next one already.
        members = [member for seen in (before.seen, after.seen) if (member := seen.get(gone.name)) is not None]
        member = next((member for member in members if member.pid == gone.pid), members[0] if members else None)
        if member is None or member.problem is None:
            cause: Cause = "exit"
            reason = f"died ({gone.text})"
        else:
            cause, reason = "problem", f"cannot go on: {member.problem} ({gone.text})"
        found[gone.name] = _failure(gone.name, member, cause, reason, now, since_s=gone.at_s)
    return found


def _problem(member: Member, now: Moment) -> Failure | None:
    if member.problem is None:
        return None
    return _failure(member.name, member, "problem", f"cannot go on: {member.problem}", now, since_s=None)


def _started_again(old: Member | None, new: Member, now: Moment) -> Failure | None:
    """A worker that somebody else restarted: the place was the old incarnation's."""
    if old is None or old.incarnation == new.incarnation:
        return None
    reason = f"was started again (incarnation {old.incarnation} is {new.incarnation} now)"
    return _failure(old.name, old, "lease", reason, now, since_s=None)


def _lease(member: Member, attendance: Attendance, now: Moment, patience_s: float) -> Failure | None:
    since_s = attendance.missing_since_s.get(member.name)
    if since_s is None:
        return None
    missed_s = now.monotonic_s - since_s
    if missed_s < attendance.limit_s(now.monotonic_s, patience_s):
        return None
    reason = f"has not renewed its lease (gone for {missed_s:.1f} s; frozen, or cut off from the store)"
    return _failure(member.name, member, "lease", reason, now, since_s=now.ago(since_s))


def _failure(
    name: WorkerName, member: Member | None, cause: Cause, reason: str, now: Moment, *, since_s: float | None
) -> Failure:
    return Failure(
        worker=name,
        incarnation=None if member is None else member.incarnation,
        cause=cause,
        reason=reason,
        seen_s=now.wall_s,
        since_s=since_s,
    )
