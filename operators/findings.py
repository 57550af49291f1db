"""What of a look is news to the repair: failures that no finding tells yet, and what each asks for. Pure."""

from __future__ import annotations

import math

from dejavu.control.journal import Failure
from dejavu.ids import WorkerName
from operators import detection
from operators.membership import Attendance
from operators.observation import Moment, Observed
from operators.repair_state import Finding, RepairState, Rules

LINK_WINDOW_S = 60.0
"""A worker whose links break again within this time is replaced: making them anew did not help."""


def failures_of(
    state: RepairState, before: Attendance, observed: Observed, now: Moment, rules: Rules
) -> tuple[Failure, ...]:
    """The failures that this look adds. ``before`` is the attendance before it, the state's the one after it."""
    plan, dead = state.newest, {finding.failure.worker for finding in state.findings if finding.is_dead}
    found = detection.failures(
        [name for name in (*plan.workers, *plan.standby) if name not in dead],
        # While the cluster starts, a worker may be ended by hand and started again; nothing is lost by that.
        before if state.has_served else Attendance(),
        state.attendance,
        observed,
        now,
        handled=state.handled,
        patience_s=rules.patience_s,
    )
    if found or not state.is_fenced or not state.has_served or observed.members is None:
        return found
    # By a repair, or by a change of the declared state.
    if state.formed_epoch != plan.epoch:
        since_s = {name: _since_s(state, name) for name in plan.workers}
        found = detection.late(plan, state.attendance, since_s, now, timeout_s=rules.start_timeout_s)
    if found or now.monotonic_s - state.blind_s < rules.confirm_s:
        return found
    return detection.broken_link(state.suspicions, state.attendance, now, confirm_s=rules.confirm_s)


def unbegun(state: RepairState, observed: Observed, rules: Rules) -> tuple[WorkerName, ...]:
    """Workers with a place that have no process yet: there is no room for one, or whoever starts them has not."""
    waiting = {name for name, pid in observed.pids.items() if pid < 0 and name in observed.running}
    is_missed = not rules.starts_processes
    return tuple(
        name for name in state.newest.workers if name in waiting or (is_missed and name not in state.attendance.seen)
    )


def _since_s(state: RepairState, name: WorkerName) -> float:
    """Since when the worker could have come to serve, in monotonic seconds."""
    return max(state.fenced_s, state.blind_s, state.unbegun_s.get(name, -math.inf), *state.starts.get(name, ()))


def finding_of(state: RepairState, failure: Failure, now: Moment) -> Finding:
    """What the failure asks for: a link that breaks for the first time in a while asks for new links alone."""
    if failure.cause != "link":
        return Finding(failure=failure)
    last_s = state.link_breaks.get(failure.worker)
    return Finding(failure=failure, is_dead=last_s is not None and now.monotonic_s - last_s < LINK_WINDOW_S)
