"""Who takes the places of the dead: a standby, a new process, or the survivors. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from dejavu.control.journal import Replacement
from dejavu.control.memory import Limits, check_moving
from dejavu.control.plan import Plan
from dejavu.control.replan import replaced, shrunk
from dejavu.ids import Epoch, IncarnationId, WorkerName

Dead = Mapping[WorkerName, IncarnationId | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan that mends a failure, and who replaces whom in it."""

    plan: Plan
    how: Mapping[WorkerName, Replacement] = field(default_factory=dict)
    by: Mapping[WorkerName, WorkerName] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hands:
    """Who is there to replace somebody."""

    ready: Sequence[WorkerName]
    """Standbys that have loaded, in the plan's order."""
    loading: Sequence[WorkerName]
    """Standbys that live and will be ready."""
    startable: frozenset[WorkerName]
    """Workers of whose name a new process may be started."""


def choose(plan: Plan, dead: Dead, links: frozenset[WorkerName], hands: Hands, *, limits: Limits) -> Choice:
    """The plan of the next epoch without the dead: by a standby, also one that loads, else a new process, else without.

    ``links`` are workers that live and whose links are made anew, as all are in a new epoch. Where a process may be
    started, the name of a dead worker whose place a standby took becomes the next standby. Raises InfeasibleError when
    the survivors cannot do it, or have no room for what they keep and what they take over.
    """
    how: dict[WorkerName, Replacement] = dict.fromkeys(sorted(links - dead.keys()), "links")
    by: dict[WorkerName, WorkerName] = {}
    ready, loading = list(hands.ready), list(hands.loading)
    for name in (worker for worker in plan.workers if worker in dead):
        if ready:
            how[name], by[name] = "standby", ready.pop(0)
        elif loading:
            # It has begun before any new process would.
            how[name], by[name] = "standby", loading.pop(0)
        elif name in hands.startable:
            how[name], by[name] = "process", name
        else:
            how[name] = "replan"
    after = replaced(plan, {name: dead[name] for name in by}, by)
    lost = {name: dead[name] for name, kind in how.items() if kind == "replan"}
    if lost:
        # A standby that does not live would be counted as a survivor.
        absent: Dead = {name: dead.get(name) for name in after.standby}
        after = shrunk(after, {**absent, **lost}, limits=limits)
        # A device too small for both pools gives rows up, which are computed again: better than the end of the run.
        check_moving(plan, after, Limits(host_bytes=limits.host_bytes), fresh={*dead, *by.values()})
    return Choice(plan=_numbered(plan, after, how, hands), how=how, by=by)


def _numbered(before: Plan, after: Plan, how: Mapping[WorkerName, Replacement], hands: Hands) -> Plan:
    """``after`` as the epoch right after ``before``, with the standbys that will be started for it."""
    new = [name for name, kind in how.items() if kind == "standby" and name in hands.startable]
    standby = tuple(dict.fromkeys((*after.standby, *new)))
    return msgspec.structs.replace(after, epoch=Epoch(before.epoch + 1), standby=standby)
