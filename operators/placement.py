"""Keeps the declared spec and the plan in force in the store, also after the store has lost them."""

from __future__ import annotations

from operators.actions import Action, PutPlan, PutSpec
from operators.observation import Observed


def decide(spec: bytes, plan: bytes, observed: Observed) -> tuple[Action, ...]:
    """Put what is missing or other than ours; nothing while the store cannot be read."""
    if observed.members is None:
        return ()
    actions: list[Action] = []
    if observed.spec != spec:
        actions.append(PutSpec())
    if observed.plan != plan:
        actions.append(PutPlan())
    return tuple(actions)
