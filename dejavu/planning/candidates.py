"""Every way to use the machines, each with its time for a round of microbatches and what stands against it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from dejavu.planning.arithmetic import (
    Inputs,
    colocated_round_s,
    disaggregated_s,
    min_prompt_depth,
    min_swapping_depth,
    min_token_depth,
)
from dejavu.planning.question import Question
from dejavu.planning.swapping import SwapRule, swap_rule

Mode: TypeAlias = Literal["colocated", "disaggregated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to use the machines."""

    mode: Mode
    prompt_depth: int
    """Machines that compute prompts; of a colocated pipeline, all."""
    token_depth: int
    """Machines that make tokens; of a colocated pipeline, all."""
    rows: int
    """Of a microbatch."""
    swapping: bool
    round_s: float
    """Inverse throughput: seconds per round of ``num_machines`` microbatches."""
    latency_s: float
    """From a prompt's start to the answer's last token, under full load and without waiting for a place."""
    in_flight: int
    """Token microbatches that have rows at once: one for each stage that makes tokens; where whole microbatches are
    replaced, those of a round, because a place stands empty while the next microbatch's prompts are computed."""
    objection: str | None = None
    """Why it cannot be done; None: it can."""

    @property
    def num_machines(self) -> int:
        """Machines in use, and microbatches of a round."""
        return self.prompt_depth if self.mode == "colocated" else self.prompt_depth + self.token_depth

    @property
    def row_s(self) -> float:
        """Seconds per request: what candidates are compared by."""
        return self.round_s / (self.num_machines * self.rows)

    @property
    def label(self) -> str:
        """``1 + 3, swapping``: how people call it."""
        place = "colocated" if self.mode == "colocated" else f"{self.prompt_depth} + {self.token_depth}"
        return f"{place}, swapping" if self.swapping else place


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batching:
    """Microbatches of one size, swapped or not: the formulas' letters as a function of the machines in use."""

    question: Question
    rows: int
    swapping: bool
    swapped_steps_s: float | None = None
    """Of all steps of a microbatch, where swapping may make a step longer than t."""

    def inputs(self, num_machines: int) -> Inputs:
        """The letters; N·t is the steps' time with the waits for KV from the host in it."""
        inputs = self.question.inputs(self.rows, num_machines)
        if self.swapped_steps_s is None or inputs.num_new_tokens == 0:
            return inputs
        # Only N·t and t < Y matter to a round's time, so the waits are spread over the steps.
        step_s = max(inputs.token_time_s, self.swapped_steps_s / inputs.num_new_tokens)
        return replace(inputs, token_time_s=step_s)

    def token_depth_needed(self, inputs: Inputs) -> int | None:
        """Fewest machines that keep the rows' KV; None: no number is enough."""
        return min_swapping_depth(inputs) if self.swapping else min_token_depth(inputs)


def candidates(question: Question) -> list[Candidate]:
    """Every pipeline and every split, in microbatches of the declared rows and, where swapping is possible, swapped.

    All machines are used, but a pipeline has at most as many stages as the model has layers. What stands against them
    is what the formulas say; see ``dejavu.planning.judging`` for the cluster's own word.
    """
    machines = question.machines.count
    return [candidate for batching in _batchings(question) for candidate in _cut(batching, machines)]


def smaller_candidates(question: Question) -> list[Candidate]:
    """The same with fewer machines. More of them keep more microbatches, and so may be too many for whole layers."""
    most = question.shape.num_layers
    counts = range(1, min(question.machines.count, 2 * most))
    found = [(count, one) for batching in _batchings(question) for count in counts for one in _cut(batching, count)]
    return [one for count, one in found if one.num_machines == count]


def swapping_rule(question: Question) -> SwapRule | None:
    """Both sides of the swap rule, to the letter; None where the bandwidth to the host is unknown."""
    inputs = question.swap_inputs(question.rows)
    return None if inputs is None else swap_rule(inputs)


def _batchings(question: Question) -> Iterator[_Batching]:
    if question.swapping != "on":
        yield _Batching(question=question, rows=question.rows, swapping=False)
    rule = swapping_rule(question)
    if question.swapping == "off" or (rule is None and question.swapping == "auto"):
        return
    sizes = [question.rows]
    twice = 2 * question.rows
    if rule is not None and rule.pays and (question.most_rows is None or twice <= question.most_rows):
        sizes.append(twice)
    for rows in sizes:
        # The rule counts the KV of B rows; a microbatch of 2B rows moves that of all of them.
        moved = question.swap_inputs(rows)
        steps_s = None if moved is None else swap_rule(moved).with_s
        yield _Batching(question=question, rows=rows, swapping=True, swapped_steps_s=steps_s)


def _cut(batching: _Batching, machines: int) -> Iterator[Candidate]:
    most = batching.question.shape.num_layers
    yield _colocated(batching, min(machines, most))
    used = min(machines, 2 * most)
    for prompt_depth in range(max(1, used - most), min(most, used - 1) + 1):
        yield _disaggregated(batching, prompt_depth, used - prompt_depth)


def _colocated(batching: _Batching, depth: int) -> Candidate:
    inputs = batching.inputs(depth)
    round_s = colocated_round_s(inputs)
    return Candidate(
        mode="colocated",
        prompt_depth=depth,
        token_depth=depth,
        rows=batching.rows,
        swapping=batching.swapping,
        round_s=round_s,
        latency_s=round_s,
        in_flight=depth,
        objection=_too_few("", batching.token_depth_needed(inputs), depth, inputs),
    )


def _disaggregated(batching: _Batching, prompt_depth: int, token_depth: int) -> Candidate:
    inputs = batching.inputs(prompt_depth + token_depth)
    return Candidate(
        mode="disaggregated",
        prompt_depth=prompt_depth,
        token_depth=token_depth,
        rows=batching.rows,
        swapping=batching.swapping,
        round_s=disaggregated_s(inputs, prompt_depth, token_depth),
        latency_s=inputs.streaming_overhead * inputs.prompt_time_s + inputs.tokens_time_s,
        in_flight=token_depth if batching.question.scheduling == "row" else prompt_depth + token_depth,
        objection=_too_few("prompt ", min_prompt_depth(inputs), prompt_depth, inputs)
        or _too_few("token ", batching.token_depth_needed(inputs), token_depth, inputs),
    )


def _too_few(kind: str, needed: int | None, depth: int, inputs: Inputs) -> str | None:
    """What is short where ``depth`` machines are fewer than ``needed``."""
    if needed is None:
        kv_bytes = inputs.num_layers * (inputs.prompt_kv_bytes + inputs.token_kv_bytes)
        return (
            f"the KV of the microbatches takes {gigabytes(kv_bytes)} of every {kind}machine, which has "
            f"{gigabytes(inputs.machine_memory_bytes)}"
        )
    if needed > depth:
        machines = "machine" if needed == 1 else "machines"
        return f"memory asks for at least {needed} {kind}{machines}, and there are {depth}"
    return None


def gigabytes(num_bytes: int | None) -> str:
    """``160 GB``; of no limit, ``no limit``."""
    return "no limit" if num_bytes is None else f"{num_bytes / 10**9:.4g} GB"
