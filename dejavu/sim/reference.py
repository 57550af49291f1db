"""Reference mode: the numbers of the original project's simulators, so that ours can be seen beside them.

Whole microbatches go round a pipeline of equal stages, each stage first come, first served. What the originals do
and the simulator of the cluster does not, all of it on purpose:

- After the prompt's own token come as many passes as the trace says tokens: one more than the answer has.
- A microbatch holds its place among the D (or D_t) under way from the moment its predecessor there ends, and stage 0
  serves the places in turn: one whose request has yet to arrive, or whose prompt is not done, blocks the others.
- Prompts of a disaggregated cluster run ahead of the tokens without limit; nobody holds them back.
- ``cache_time_ms`` is added after every prompt stage, and occupies neither the stage nor a link.
- The rate counts groups of D microbatches; those past a multiple of D arrive at 0 (``group_arrivals``).

Found by comparing results with those of msr-fiddle/dejavu @07e76be9, scripts/simulators; no code of theirs is here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

_SEED = 42


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceResult:
    """When each microbatch ended, in the order of the trace."""

    arrival_s: tuple[float, ...]
    finish_s: tuple[float, ...]
    prompt_s: tuple[float, ...]
    """Each stage was busy with prompts for so long; prompt stages come first."""
    token_s: tuple[float, ...]
    """And with tokens."""

    @property
    def makespan_s(self) -> float:
        """From 0 to the last microbatch's end."""
        return max(self.finish_s, default=0.0)


def group_arrivals(num_microbatches: int, rate: float, num_machines: int) -> tuple[float, ...]:
    """Arrival times in seconds as the originals draw them: a group of ``num_machines`` microbatches an arrival.

    The first group arrives at 0, and so do the microbatches that fill no group. Rate 0: all at 0.
    """
    if rate == 0:
        return (0.0,) * num_microbatches
    num_groups = num_microbatches // num_machines
    gaps_s = np.random.RandomState(_SEED).exponential(scale=1 / rate, size=num_groups)
    times_s = [0.0, *np.cumsum(gaps_s).tolist()]
    groups = (number // num_machines for number in range(num_microbatches))
    return tuple(times_s[group] if group < num_groups else 0.0 for group in groups)


def colocated(
    trace: Sequence[int], arrival_s: Sequence[float], *, depth: int, prompt_s: float, token_s: float
) -> ReferenceResult:
    """One pipeline of ``depth`` stages for prompts and tokens. Times are those of one stage, in seconds."""
    ring = _Ring(depth, prompt_s=prompt_s, token_s=token_s)
    return ReferenceResult(
        arrival_s=tuple(arrival_s),
        finish_s=tuple(ring.run(trace, arrival_s)),
        prompt_s=(len(trace) * prompt_s,) * depth,
        token_s=(sum(trace) * token_s,) * depth,
    )


def disaggregated(
    trace: Sequence[int],
    arrival_s: Sequence[float],
    *,
    prompt_depth: int,
    token_depth: int,
    prompt_s: float,
    token_s: float,
    cache_s: float = 0.0,
) -> ReferenceResult:
    """A pipeline for prompts and one for tokens. Times are those of one stage of each, in seconds."""
    ready_s = _prompts(arrival_s, prompt_depth, prompt_s, cache_s)
    ring = _Ring(token_depth, prompt_s=None, token_s=token_s)
    return ReferenceResult(
        arrival_s=tuple(arrival_s),
        finish_s=tuple(ring.run(trace, ready_s)),
        prompt_s=(len(trace) * prompt_s,) * prompt_depth + (0.0,) * token_depth,
        token_s=(0.0,) * prompt_depth + (sum(trace) * token_s,) * token_depth,
    )


def _prompts(arrival_s: Sequence[float], depth: int, prompt_s: float, cache_s: float) -> list[float]:
    """When each prompt has left the last stage and its cache has arrived, served in the order of the trace."""
    free_s = [0.0] * depth
    ready_s = []
    for at_s in arrival_s:
        for stage in range(depth):
            free_s[stage] = max(at_s, free_s[stage]) + prompt_s
            at_s = free_s[stage] + cache_s
        ready_s.append(at_s)
    return ready_s


class _Ring:
    """Passes through a pipeline of equal stages, in the order in which they queue at stage 0.

    Every stage keeps the order, so a pass's times follow from when the stages become free. Mostly they become free one
    token time after the other, and the next pass meets no wait: then its times are known without a look at the stages.
    """

    def __init__(self, depth: int, *, prompt_s: float | None, token_s: float) -> None:
        self._depth = depth
        self._prompt_s = prompt_s
        self._token_s = token_s
        self._free_s = [0.0] * depth
        self._is_even = False
        """Each stage becomes free one token time after the one before it; only stage 0's ``_free_s`` is kept then."""

    def run(self, trace: Sequence[int], ready_s: Sequence[float]) -> list[float]:
        """When each microbatch has made its prompt pass, if prompts are made here, and as many passes as tokens."""
        finish_s = [0.0] * len(trace)
        left = list(trace)
        waiting = iter(range(len(trace)))
        in_prompt = self._prompt_s is not None
        queue = deque((number, ready_s[number], in_prompt) for number in islice(waiting, self._depth))
        while queue:
            number, at_s, is_prompt = queue.popleft()
            if is_prompt:
                assert self._prompt_s is not None
                at_s = self._pass(at_s, self._prompt_s, is_token=False)
            else:
                at_s = self._token(at_s)
                left[number] -= 1
            if left[number] > 0:
                queue.append((number, at_s, False))
                continue
            finish_s[number] = at_s
            following = next(waiting, None)
            if following is not None:
                queue.append((following, max(at_s, ready_s[following]), in_prompt))
        return finish_s

    def _token(self, at_s: float) -> float:
        if not self._is_even:
            return self._pass(at_s, self._token_s, is_token=True)
        free_s = self._free_s
        if at_s < free_s[0]:
            at_s = free_s[0]
        free_s[0] = at_s + self._token_s
        return at_s + self._depth * self._token_s

    def _pass(self, at_s: float, stage_s: float, *, is_token: bool) -> float:
        """When the pass that may start at ``at_s`` leaves the last stage."""
        free_s = self._free_s
        if self._is_even:
            free_s[:] = [free_s[0] + stage * self._token_s for stage in range(self._depth)]
        at_s = max(at_s, free_s[0])
        waited = False
        for stage, stage_free_s in enumerate(free_s):
            if stage_free_s > at_s:
                at_s, waited = stage_free_s, True
            at_s += stage_s
            free_s[stage] = at_s
        self._is_even = is_token and not waited
        return at_s
