"""The planner's answer by trying everything, from the paper's formulas and a plain count of bytes; for tests.

Uses none of the planner's code: only the numbers of a question made by ``planning_kit.asked``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from dejavu.planning.costs import GivenCosts
from dejavu.planning.question import Question

PROMPT = 100
LAYER_BYTES, EMBEDDING_BYTES, HEAD_BYTES, CELL_BYTES = 1000, 40, 44, 8
HEAD_LAYERS = HEAD_BYTES / LAYER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way that can be done."""

    prompt: int
    """0: one pipeline."""
    token: int
    rows: int
    swapping: bool
    row_s: float


def ways(question: Question) -> list[Way]:
    """Everything that can be done with up to all machines."""
    return [way for one in _Machines.of(question).sizes() for way in one]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machines:
    count: int
    layers: int
    memory: int | None
    host: int | None
    length: int
    new: int
    rows: int
    prompt_s: float
    """Of ``rows`` rows."""
    token_s: float
    bus: float | None
    """Bytes per second."""
    link: float | None
    overhead: float | None

    @staticmethod
    def of(question: Question) -> _Machines:
        machines, costs = question.machines, question.times.costs
        assert isinstance(costs, GivenCosts)
        return _Machines(
            count=machines.count,
            layers=question.shape.num_layers,
            memory=machines.device_memory_bytes,
            host=machines.host_memory_bytes,
            length=question.shape.max_length,
            new=question.lengths.max_new_tokens,
            rows=question.rows,
            prompt_s=costs.whole_prompt_time_s,
            token_s=costs.whole_token_time_s,
            bus=None if machines.pcie_gbps is None else machines.pcie_gbps * 1e9 / 8,
            link=None if machines.link_gbps is None else machines.link_gbps * 1e9 / 8,
            overhead=question.streaming_overhead,
        )

    def sizes(self) -> Iterator[Iterator[Way]]:
        yield self.cuts(self.rows, swapping=False)
        if self.bus is None:
            return
        yield self.cuts(self.rows, swapping=True)
        if 2 * self.new * self.token_s >= self.steps_s(self.rows) > 0:
            yield self.cuts(2 * self.rows, swapping=True)

    def steps_s(self, rows: int) -> float:
        """Of the rule: every step, or the transfer of its KV where that takes longer."""
        assert self.bus is not None
        a_token_s = rows * self.layers * CELL_BYTES / self.bus
        return sum(max(self.token_s, i * a_token_s) for i in range(PROMPT, PROMPT + self.new + 1))

    def cuts(self, rows: int, *, swapping: bool) -> Iterator[Way]:
        # What all machines hold without swapping, fewer need not swap.
        is_needless = swapping and any(
            self.possible(prompt, self.count - prompt, rows, False) for prompt in range(self.count)
        )
        for prompt in range(self.count):
            for token in range(1, self.count - prompt + 1):
                if max(prompt, token) > self.layers or not self.possible(prompt, token, rows, swapping):
                    continue
                used = prompt + token
                if is_needless and used < self.count:
                    continue
                row_s = self.round_s(prompt, token, rows, swapping) / (used * rows)
                yield Way(prompt=prompt, token=token, rows=rows, swapping=swapping, row_s=row_s)

    def round_s(self, prompt: int, token: int, rows: int, swapping: bool) -> float:
        prompt_s, used = self.prompt_s * rows / self.rows, prompt + token
        step_s = max(self.token_s, self.steps_s(rows) / self.new) if swapping and self.new else self.token_s
        if not prompt:
            return max(0.0, (used - 1) * (prompt_s - step_s) / used) + prompt_s + self.new * step_s
        overhead = self.overhead
        if overhead is None:
            sent_s = 0.0 if self.link is None else rows * PROMPT * self.layers * CELL_BYTES / self.link
            overhead = max(1.0, sent_s / prompt_s) if prompt_s else 1.0
        return max(used * overhead * prompt_s / prompt, used * self.new * step_s / token)

    def possible(self, prompt: int, token: int, rows: int, swapping: bool) -> bool:
        if swapping and (token <= 2 or self.possible(prompt, token, rows, False)):
            return False
        if self.memory is None:
            return True
        row = self.length * CELL_BYTES
        stored = 2 if swapping else token
        return (
            self.formulas(prompt, token, rows, swapping)
            and (not prompt or self.fits(prompt, rows * row, is_token=False, is_prompt=True))
            and self.fits(token, stored * rows * row, is_token=bool(prompt), is_prompt=False)
            and (
                not swapping
                or self.host is None
                or self.most_layers(token, bool(prompt)) * token * rows * row <= self.host
            )
        )

    def formulas(self, prompt: int, token: int, rows: int, swapping: bool) -> bool:
        """The paper's bounds, in layers that can be cut."""
        assert self.memory is not None
        cells = rows * (PROMPT + self.new) * CELL_BYTES
        if prompt and prompt * self.memory < self.layers * (rows * PROMPT * CELL_BYTES + LAYER_BYTES):
            return False
        if swapping:
            return token * self.memory >= self.layers * (LAYER_BYTES + 2 * cells)
        return self.memory > self.layers * cells and (
            token * (self.memory - self.layers * cells) >= self.layers * LAYER_BYTES
        )

    def fits(self, depth: int, a_layer: int, *, is_token: bool, is_prompt: bool) -> bool:
        """Whole layers, the first stage with the embedding and the last with the head."""
        assert self.memory is not None
        counts = self.counts(depth, 0.0 if is_prompt else HEAD_LAYERS * (1.0 if is_token else 0.25))
        for index, count in enumerate(counts):
            weights = count * LAYER_BYTES + EMBEDDING_BYTES * (index == 0) + HEAD_BYTES * (index == depth - 1)
            if weights + count * a_layer > self.memory:
                return False
        return True

    def most_layers(self, depth: int, is_split: bool) -> int:
        return max(self.counts(depth, HEAD_LAYERS * (1.0 if is_split else 0.25)))

    def counts(self, depth: int, extra: float) -> list[int]:
        """Layers of each stage, its work as near to equal as whole layers allow."""
        stops = [0]
        for index in range(1, depth):
            ideal = round((self.layers + extra) * index / depth)
            stops.append(min(max(ideal, stops[-1] + 1), self.layers - depth + index))
        stops.append(self.layers)
        return [stop - start for start, stop in pairwise(stops)]
