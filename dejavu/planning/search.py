"""Chooses among the candidates: every one is evaluated, none is rounded to. Says why, also when the answer is no."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dejavu.planning.arithmetic import (
    Inputs,
    colocated_s,
    equal_split,
    may_pay,
    min_prompt_depth,
    min_token_depth,
    prompt_pipeline_s,
    ratio,
    threshold,
    token_pipeline_s,
)
from dejavu.planning.candidates import Candidate, candidates, smaller_candidates, swapping_rule
from dejavu.planning.judging import fits_resident, judged
from dejavu.planning.question import Question
from dejavu.planning.swapping import SwapRule

MOST_RUNNERS_UP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Formulas:
    """The paper's formulas for microbatches of the declared rows, without swapping; what is undefined is None."""

    inputs: Inputs
    prompt_depth: int | None
    """Of the split for which ``prompt_s`` and ``token_s`` stand: the chosen or the best one; None: there is none."""
    token_depth: int | None
    colocated_s: float
    prompt_s: float | None
    token_s: float | None
    ratio: float | None
    threshold: float | None
    may_pay: bool
    min_prompt_depth: int
    min_token_depth: int | None
    equal_split: tuple[float, float] | None
    """Fractions of machines at which prompts and tokens take the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan, or why there is none."""

    question: Question
    chosen: Candidate | None
    """None: infeasible."""
    reason: str
    formulas: Formulas
    swap: SwapRule | None
    runners_up: tuple[Candidate, ...]
    """The next best that can be done with as many machines, best first."""
    refused: tuple[Candidate, ...]
    """Those that would be as fast as the chosen one or faster, but cannot be done, fastest first."""


def plan(question: Question) -> Answer:
    """The fastest candidate that can be done; of equally fast ones the simplest. Never raises on valid input."""
    every = sorted(candidates(question), key=_order)
    ranked = judged(question, every, enough=1 + MOST_RUNNERS_UP)
    needless = _swapped_for_nothing(question, ranked, every)
    fastest = next((one for one in ranked if not (one.swapping and one.rows in needless)), ranked[0])
    if fastest.objection is not None:
        # No smaller one is as fast as the fastest of all machines; it is only where that one cannot be done.
        smaller = [one for one in smaller_candidates(question) if not (one.swapping and one.rows in needless)]
        every = sorted([*every, *smaller], key=_order)
        ranked = judged(question, every, enough=1 + MOST_RUNNERS_UP)
    possible = [one for one in ranked if one.objection is None]
    chosen = possible[0] if possible else None
    formulas = _formulas(question, ranked, every)
    return Answer(
        question=question,
        chosen=chosen,
        reason=_infeasible(question, ranked) if chosen is None else _reason(question, chosen, ranked, formulas),
        formulas=formulas,
        swap=swapping_rule(question),
        runners_up=_runners_up(possible),
        refused=tuple(
            one for one in ranked if one.objection is not None and (chosen is None or one.row_s <= chosen.row_s)
        )[:MOST_RUNNERS_UP],
    )


def _swapped_for_nothing(question: Question, ranked: Sequence[Candidate], every: Sequence[Candidate]) -> frozenset[int]:
    """Sizes of microbatches that some way to use all machines holds without swapping: fewer machines need not swap
    them either. Not looked into where the fastest way can be done anyway."""
    if question.swapping != "auto" or ranked[0].objection is None:
        return frozenset()
    sizes = {one.rows for one in every if one.swapping}
    return frozenset(
        rows
        for rows in sizes
        if any(one.rows == rows and one.swapping and fits_resident(question, one) for one in every)
    )


def _runners_up(possible: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Of what can be done: with fewer machines it is nobody's question."""
    most = possible[0].num_machines if possible else 0
    return tuple(one for one in possible[1:] if one.num_machines >= most)[:MOST_RUNNERS_UP]


def _order(candidate: Candidate) -> tuple[float, bool, bool, int, int, int]:
    """Fast, then simple: no split, no swapping, fewer rows; then all machines, both sides least apart."""
    return (
        candidate.row_s,
        candidate.mode == "disaggregated",
        candidate.swapping,
        candidate.rows,
        -candidate.num_machines,
        abs(candidate.prompt_depth - candidate.token_depth),
    )


def _formulas(question: Question, ranked: Sequence[Candidate], every: Sequence[Candidate]) -> Formulas:
    possible = [one for one in ranked if one.objection is None]
    # Best what can be done without swapping, then what cannot, then what swaps.
    known = sorted([*possible, *every], key=lambda one: one.swapping)
    split = next((one for one in known if one.mode == "disaggregated"), None)
    colocated = next(one for one in known if one.mode == "colocated")
    inputs = question.inputs(question.rows, (split or colocated).num_machines)
    return Formulas(
        inputs=inputs,
        prompt_depth=split.prompt_depth if split else None,
        token_depth=split.token_depth if split else None,
        colocated_s=colocated_s(inputs),
        prompt_s=prompt_pipeline_s(inputs, split.prompt_depth) if split else None,
        token_s=token_pipeline_s(inputs, split.token_depth) if split else None,
        ratio=ratio(inputs),
        threshold=threshold(inputs),
        may_pay=may_pay(inputs),
        min_prompt_depth=min_prompt_depth(inputs),
        min_token_depth=min_token_depth(inputs),
        equal_split=equal_split(inputs),
    )


def _infeasible(question: Question, ranked: Sequence[Candidate]) -> str:
    """What stands against one pipeline of all machines, which needs the least memory, and against swapping it."""
    found = [one for one in ranked if one.mode == "colocated"]
    longest = max(one.num_machines for one in found)
    colocated = [one for one in found if one.num_machines == longest]
    objections = dict.fromkeys(f"{one.objection}{' (swapping)' if one.swapping else ''}" for one in colocated)
    memory, weights = question.machines.memory_bytes, question.shape.num_parameters * question.shape.dtype_bytes
    return (
        f"infeasible because {'; '.join(objections)}\n"
        f"{question.shape.name} has {weights / 1e9:.4g} GB of weights, "
        f"a microbatch of {question.rows} rows {_kv_gigabytes(question):.4g} GB of KV, and "
        f"{question.machines.count} x {(memory or 0) / 1e9:.4g} GB are there\n"
        "give more machines or memory, fewer rows (strategy.microbatch.token) or shorter requests"
    )


def _kv_gigabytes(question: Question) -> float:
    tokens = question.lengths.max_prompt_tokens + question.lengths.max_new_tokens
    return question.rows * tokens * question.shape.kv_bytes_per_token / 1e9


def _reason(question: Question, chosen: Candidate, ranked: Sequence[Candidate], formulas: Formulas) -> str:
    """Why split, or why not, with the numbers that decide."""
    other_mode = "colocated" if chosen.mode == "disaggregated" else "disaggregated"
    others = [one for one in ranked if one.mode == other_mode]
    rival = next((one for one in others if one.objection is None), None)
    mine = f"{_seconds(chosen.row_s)} a request ({chosen.label})"
    if chosen.mode == "disaggregated":
        if rival is None:
            return f"disaggregate: {mine}; one pipeline of all machines cannot be done: {_plainest(others).objection}"
        return f"disaggregate: {mine}, colocated {_seconds(rival.row_s)}: {_times(rival, chosen)}{_rule(formulas)}"
    if not others:
        return f"do not disaggregate: a split needs at least 2 machines, and there are {question.machines.count}"
    if rival is None:
        first = _plainest(others)
        return f"do not disaggregate: no split can be done: {first.label}: {first.objection}"
    if chosen.row_s == 0:
        return "do not disaggregate: nothing takes any time (profile.prompt_time_s and profile.token_time_s are 0)"
    return f"do not disaggregate: {mine}, the best split ({rival.label}) {_seconds(rival.row_s)}{_rule(formulas)}"


def _plainest(refused: Sequence[Candidate]) -> Candidate:
    """The fastest that does not swap: what stands against swapping is not why a mode cannot be done."""
    return next((one for one in refused if not one.swapping), refused[0])


def _times(slower: Candidate, faster: Candidate) -> str:
    if faster.row_s == 0:
        return "no time at all"
    return f"{slower.row_s / faster.row_s:.3g} times as fast"


def _rule(formulas: Formulas) -> str:
    """The paper's condition with its numbers."""
    if formulas.threshold is None:
        return (
            f"; no split can pay with a streaming overhead m of {formulas.inputs.streaming_overhead:.4g} "
            f"on {formulas.inputs.num_machines} machines: D(2 - m) - 1 is not above 0"
        )
    quotient = "undefined" if formulas.ratio is None else f"{formulas.ratio:.4g}"
    return f"; Y/t is {quotient}, and a split can pay only above {formulas.threshold:.4g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s"
