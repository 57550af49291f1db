"""Pipelines of stages that rehearse, without processes: a virtual clock, pools, and tokens that come out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import torch
from torch import Tensor

from dejavu.clock import Clock, VirtualClock
from dejavu.kv.layout import LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.writers import PromptWriter, StepWriter
from dejavu.models.modelled_stage import ModelledStage
from dejavu.models.modelled_times import ModelledTimes, TimeTable
from dejavu.models.pace import Pace
from dejavu.models.spec import ModelSpec

from harness.plans import made_up_spec

NUM_LAYERS = 6


def made_up_times(*, prompt_s: float = 0.6, step_s: float = 0.06, time_scale: float = 1.0) -> ModelledTimes:
    """A prompt of one token takes ``prompt_s`` and each further token a tenth more; a step ``step_s`` for every row."""
    return ModelledTimes(
        source="made up",
        prompt=TimeTable(rows=(1,), tokens=(1.0, 11.0), seconds=((prompt_s, 2 * prompt_s),)),
        step=TimeTable(rows=(1, 2), tokens=(1.0,), seconds=((step_s,), (2 * step_s,))),
        time_scale=time_scale,
        kv_scale=0.5,
    )


def rehearsed_spec(times: ModelledTimes | None = None, *, dtype: str = "float16") -> ModelSpec:
    """A made-up model of six layers as a rehearsal has it."""
    spec = made_up_spec(num_layers=NUM_LAYERS)
    return msgspec.structs.replace(spec, modelled=times or made_up_times(), dtype=dtype, hidden_size=8, head_dim=1)


def stage_of(spec: ModelSpec, layers: LayerRange, clock: Clock | None = None) -> ModelledStage:
    """A stage at a pace of its own."""
    assert spec.modelled is not None
    return ModelledStage(spec=spec, layers=layers, times=spec.modelled, pace=Pace(clock or VirtualClock()))


class Rehearsing:
    """Stages in a row, each with a pool, that make tokens for rows of their own."""

    def __init__(self, spec: ModelSpec, bounds: Sequence[int], *, num_rows: int = 4) -> None:
        """``bounds`` are where stages begin, and where the last one ends."""
        ranges = [LayerRange(start, stop) for start, stop in pairwise(bounds)]
        self.stages = [stage_of(spec, layers) for layers in ranges]
        self.pools = [KvPool(spec.layout, layers, num_rows) for layers in ranges]

    def prompt(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """The first new token of each; prompt i lies in row i."""
        lengths = [len(prompt) for prompt in prompts]
        hidden = torch.tensor([[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts])
        for stage, pool in zip(self.stages, self.pools, strict=True):
            hidden = stage.prompt(hidden, lengths, PromptWriter(pool, range(len(prompts)), lengths))
        return _best(hidden)

    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> list[int]:
        """The next token of each row, whose last one takes the position."""
        hidden = torch.tensor(tokens)[:, None]
        for stage, pool in zip(self.stages, self.pools, strict=True):
            sink = StepWriter(pool, 0, len(tokens), range(len(tokens)), list(positions))
            hidden = stage.step(hidden, positions, sink)
        return _best(hidden)

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """So many new tokens of one row."""
        made = self.prompt([prompt])
        while len(made) < num_tokens:
            made += self.step(made[-1:], [len(prompt) + len(made) - 1])
        return made


def _best(logits_BV: Tensor) -> list[int]:
    best: list[int] = logits_BV.argmax(-1).tolist()
    return best
