"""Ways to use so many machines, and a quick guess at which of them is best, to be simulated then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal

from dejavu.control.plan import Mode
from dejavu.planning.costs import Costs
from dejavu.request import Request
from dejavu.sim.reference import colocated, disaggregated

Case = Literal["baseline", "baseline_dp", "disaggregated"]
"""One pipeline; several that share a queue; one for prompts and one for tokens (DejaVu, appendix B)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """One way to use the machines."""

    replicas: int = 1
    depth: int = 0
    """Of each colocated pipeline; 0: disaggregated."""
    split: tuple[int, int] = (0, 0)
    """Prompt and token stages; zeros: colocated."""
    rows: int
    """Of a microbatch, of prompts and of tokens."""

    @property
    def mode(self) -> Mode:
        """Of its plan."""
        return "colocated" if self.depth else "disaggregated"

    @property
    def num_machines(self) -> int:
        """That it uses."""
        return self.replicas * self.depth if self.depth else sum(self.split)

    @property
    def label(self) -> str:
        """``8``, ``2 × 4`` or ``3 + 5``."""
        if not self.depth:
            return f"{self.split[0]} + {self.split[1]}"
        return f"{self.depth}" if self.replicas == 1 else f"{self.replicas} × {self.depth}"

    @property
    def in_flights(self) -> tuple[int, ...]:
        """Numbers of token microbatches in flight to try, the best first.

        A pipeline for prompts runs ahead only as far as its tokens have rows: best are enough for both pipelines.
        """
        if self.depth:
            return (self.depth,)
        return tuple(range(self.num_machines + 1, self.split[1] - 1, -1))


def arrangements(case: Case, num_machines: int, rows: Sequence[int], num_layers: int) -> list[Arrangement]:
    """Every arrangement of the case that uses all machines and has a layer for each stage."""
    match case:
        case "baseline":
            found = [Arrangement(rows=one, depth=num_machines) for one in rows]
        case "baseline_dp":
            replicas = [count for count in range(2, num_machines + 1) if num_machines % count == 0]
            found = [
                Arrangement(rows=one, replicas=count, depth=num_machines // count) for count in replicas for one in rows
            ]
        case "disaggregated":
            splits = [(prompt, num_machines - prompt) for prompt in range(1, num_machines)]
            found = [Arrangement(rows=one, split=split) for split in splits for one in rows]
    return [one for one in found if max(one.depth, *one.split) <= num_layers]


def guessed_s(
    one: Arrangement,
    requests: Sequence[Request],
    costs: Costs,
    *,
    overhead: float,
    handover_s: float,
    in_flight: int | None = None,
) -> float:
    """About how long the requests take, all there from the start: whole microbatches through equal stages.

    For ranking alone: hops are left out, and what waits for rows is counted as if no row were ever empty.

    Args:
        overhead: m, of prompts whose KV is streamed.
        handover_s: the KV of a token of a prompt, all layers, over one link; each prompt stage has a link.
        in_flight: microbatches that a split has rows for, from the start of their prompts on; None: as many as wanted.
    """
    batches = [requests[at : at + one.rows] for at in range(0, len(requests), one.rows)]
    prompt = mean(max(len(request.prompt_tokens) for request in batch) for batch in batches)
    steps = [max(request.max_tokens for request in batch) - 1 for batch in batches]
    prompt_s = costs.prompt_time_s(one.rows, prompt)
    token_s = costs.step_time_s(one.rows, prompt + mean(steps) / 2)
    if not one.depth:
        prompt_depth, token_depth = one.split
        held_s = len(steps) * prompt_s * overhead + sum(steps) * token_s
        least_s = held_s / in_flight if in_flight else 0.0
        made_s = disaggregated(
            steps,
            [0.0] * len(steps),
            prompt_depth=prompt_depth,
            token_depth=token_depth,
            prompt_s=max(prompt_s * overhead, one.rows * prompt * handover_s) / prompt_depth,
            token_s=token_s / token_depth,
        ).makespan_s
        return max(made_s, least_s)
    return max(
        colocated(
            own, [0.0] * len(own), depth=one.depth, prompt_s=prompt_s / one.depth, token_s=token_s / one.depth
        ).makespan_s
        for own in _shared_out(steps, one.replicas)
    )


def _shared_out(steps: Sequence[int], replicas: int) -> list[list[int]]:
    """Each microbatch goes to whoever has the fewest steps to do, about as a shared queue does it."""
    parts: list[list[int]] = [[] for _ in range(replicas)]
    for count in steps:
        min(parts, key=sum).append(count)
    return parts
