"""Takes up a change of the declared state that somebody put into the store, and follows it to its end. Pure.

It goes the way of a repair, with nobody dead: a plan of the next epoch is a fence, the workers go over to it, and the
controller lets the rows go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
from msgspec.structs import replace as changed

from dejavu.config.declared import read_declared
from dejavu.control.changing import LIVE, changed_plan
from dejavu.control.journal import RestoreReceipt
from dejavu.control.member import encode_json
from dejavu.control.spec_change import SpecChange, differences, why_fixed
from dejavu.errors import ConfigError, InfeasibleError
from dejavu.ids import Epoch
from operators.actions import Action, DropChange, PutChange, PutSpec
from operators.observation import Moment, Observed
from operators.placement import revision_of
from operators.repair_state import RepairState, Rules

Step = tuple[RepairState, tuple[Action, ...]]

KEPT = 32
"""The newest changes that the store keeps."""


def step(state: RepairState, observed: Observed, now: Moment, rules: Rules) -> Step:
    """The state after one look at the declared state, and what is to be done about it."""
    state = _followed(state, now)
    wish = _wish(state, observed)
    return (state, ()) if wish is None else _taken_up(state, wish, now, rules)


def resumed(state: RepairState, epoch: Epoch, receipt: RestoreReceipt) -> RepairState:
    """The state in which the controller's rows go on in this epoch: the change that led there is in force."""
    change = state.change
    if change is None or change.epoch is None or epoch < change.epoch or change.phase != "restore":
        return state
    return _with(state, changed(change, phase="done", receipt=receipt))


def decide(changes: Sequence[SpecChange], observed: Observed) -> tuple[Action, ...]:
    """Put the newest changes that the store has not or has otherwise; drop the others. Nothing without a store."""
    if observed.members is None:
        return ()
    wanted = {change.revision: encode_json(change) for change in changes[-KEPT:]}
    puts = [PutChange(revision=n, value=value) for n, value in wanted.items() if observed.changes.get(n) != value]
    return (*puts, *(DropChange(revision=revision) for revision in observed.changes if revision not in wanted))


def told(before: SpecChange | None, after: SpecChange) -> str | None:
    """What a reader of the log is told of the change; None when that is nothing new."""
    if before is not None and (before.phase == after.phase or after.phase == "restore"):
        return None
    match after.phase:
        case "form" | "restore":
            what = f"{after.text}: epoch {after.epoch}"
        case "refused" | "failed":
            what = f"{after.text}: {after.phase}: {after.reason}"
        case "done":
            what = f"{after.text}: in force" if after.differences else "nothing differs"
    return f"change {after.revision}: {what}"


def headline(change: SpecChange) -> str:
    """What is being changed."""
    return f"change {change.revision} of the declared state ({change.text}): {change.phase}"


def _wish(state: RepairState, observed: Observed) -> bytes | None:
    """The declared state in the store, where it is newer than ours and the cluster has time for it."""
    is_quiet = (
        state.is_fenced
        and state.journal is None
        and state.change is None
        and state.formed_epoch == state.plan.epoch
        and state.problem is None
        and not observed.is_ending
        and observed.members is not None
    )
    if not is_quiet or observed.spec is None or revision_of(observed.spec) <= revision_of(state.spec):
        return None
    return observed.spec


def _taken_up(state: RepairState, wish: bytes, now: Moment, rules: Rules) -> Step:
    revision = revision_of(wish)
    change = SpecChange(revision=revision, differences=_differences(state.spec, wish), asked_s=now.wall_s)
    try:
        read_declared(wish)
        _check_live(change)
        plan = None
        if change.differences:
            wanted = {key: after for key, (_, after) in change.differences.items()}
            plan = changed_plan(state.plan, wanted, revision=revision, may_grow=rules.may_grow, limits=rules.limits)
    except (ConfigError, InfeasibleError) as error:
        refused = changed(change, phase="refused", reason=str(error), is_infeasible=isinstance(error, InfeasibleError))
        # The revision is used up, and the state is what it was.
        spec = encode_json({**_decoded(state.spec), "revision": revision})
        return replace(state, spec=spec, changes=(*state.changes, refused)), ()
    change = changed(change, phase="done") if plan is None else changed(change, epoch=plan.epoch)
    # Also where it is there already: it has to lie on the controller's lease.
    return replace(state, spec=wish, pending=plan, changes=(*state.changes, change)), (PutSpec(previous=wish),)


def _check_live(change: SpecChange) -> None:
    """Raises ConfigError naming the first key that cannot change now, and why."""
    for key, (_, after) in change.differences.items():
        reason = why_fixed(key, LIVE)
        if reason is not None:
            raise ConfigError(
                f"{key}={msgspec.json.encode(after).decode()}: cannot change while the cluster runs: {reason}"
            )


def _followed(state: RepairState, now: Moment) -> RepairState:
    """The change that is going on, with what has come of it."""
    change = state.change
    if change is None or change.epoch is None:
        return state
    if state.problem is not None:
        return _with(state, changed(change, phase="failed", reason=state.problem))
    is_formed = state.formed_epoch is not None and state.formed_epoch >= change.epoch
    if change.fenced_s is None and state.plan.epoch >= change.epoch:
        change = changed(change, fenced_s=now.wall_s)
    if change.formed_s is None and is_formed:
        change = changed(change, formed_s=now.wall_s, phase="restore")
    return _with(state, change)


def _with(state: RepairState, change: SpecChange) -> RepairState:
    return replace(state, changes=(*state.changes[:-1], change))


def _differences(before: bytes, after: bytes) -> dict[str, tuple[object, object]]:
    found = differences(_decoded(before), _decoded(after))
    found.pop("revision", None)
    return found


def _decoded(value: bytes) -> Mapping[str, object]:
    try:
        return msgspec.json.decode(value, type=dict[str, object])
    except msgspec.DecodeError:
        return {}
