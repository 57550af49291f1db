"""Keeps the declared spec and the plan in force in the store, also after the store has lost them."""

from __future__ import annotations

import msgspec

from dejavu.control.member import encode_json
from dejavu.control.plan import Plan
from operators.actions import Action, PutPlan, PutSpec
from operators.observation import Observed


class _EpochOnly(msgspec.Struct, frozen=True):
    """What must be known of any plan, however new: its epoch."""

    epoch: int


class _RevisionOnly(msgspec.Struct, frozen=True):
    """What must be known of any declared state, however it looks: its revision."""

    revision: int


def decide(spec: bytes, plan: Plan, observed: Observed) -> tuple[Action, ...]:
    """Put what is missing or other than ours; nothing while the store cannot be read.

    ``plan`` is the newest one, in force or about to be. One of a newer epoch is left alone, and so is a declared state
    of a newer revision, which is somebody's wish.
    """
    if observed.members is None:
        return ()
    actions: list[Action] = []
    if observed.spec != spec and revision_of(observed.spec) <= revision_of(spec):
        actions.append(PutSpec(previous=observed.spec))
    if not is_in_store(plan, observed) and epoch_of(observed.plan) <= plan.epoch:
        actions.append(PutPlan(plan=plan, previous=observed.plan))
    return tuple(actions)


def is_in_store(plan: Plan, observed: Observed) -> bool:
    """True when the last look found exactly this plan."""
    return observed.plan == encode_json(plan)


def epoch_of(value: bytes | None) -> int:
    """The epoch of a plan's value; -1 for none and for one that is no plan."""
    if value is None:
        return -1
    try:
        return msgspec.json.decode(value, type=_EpochOnly).epoch
    except msgspec.DecodeError:
        return -1


def revision_of(value: bytes | None) -> int:
    """The revision of a declared state's value; -1 for none and for one that has none."""
    if value is None:
        return -1
    try:
        return msgspec.json.decode(value, type=_RevisionOnly).revision
    except msgspec.DecodeError:
        return -1
