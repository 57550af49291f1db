"""What stands against a candidate in the cluster's eyes: memory as ``place`` counts it, and swapping for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dejavu.control.memory import SWAPPED_MICROBATCHES
from dejavu.planning.candidates import Candidate
from dejavu.planning.memory import memory_objection
from dejavu.planning.question import Question


def judged(question: Question, ranked: Sequence[Candidate], *, enough: int) -> list[Candidate]:
    """The candidates with all that stands against them, in their order, until ``enough`` can be done.

    Of those that can, both modes have one where there is one. What follows was not looked at and is left out.
    """
    seen: list[Candidate] = []
    possible: list[Candidate] = []
    modes = {one.mode for one in ranked}
    for one in ranked:
        if len(possible) >= enough and {other.mode for other in possible} == modes:
            break
        seen.append(replace(one, objection=objection(question, one)))
        if seen[-1].objection is None:
            possible.append(seen[-1])
    return seen


def objection(question: Question, one: Candidate) -> str | None:
    """The first thing that stands against it; None: a cluster takes it as it is."""
    if one.swapping and question.swapping == "auto":
        needless = _needless(question, one)
        if needless is not None:
            return needless
    return one.objection or memory_objection(question, one)


def _needless(question: Question, one: Candidate) -> str | None:
    """Why swapping would give nothing."""
    if one.in_flight <= SWAPPED_MICROBATCHES:
        return f"two microbatches always lie on the device, and {one.in_flight} would be in flight"
    if fits_resident(question, one):
        return f"the KV of all microbatches of {one.rows} rows fits without swapping"
    return None


def fits_resident(question: Question, one: Candidate) -> bool:
    """Whether the candidate's rows would fit where none of them is swapped."""
    return memory_objection(question, replace(one, swapping=False)) is None
