"""What each stage of a plan holds, layer by layer as the layers are really cut, beside what its machine has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from dejavu.control.layers import balanced_layers
from dejavu.kv.layout import LayerRange
from dejavu.planning.candidates import Candidate
from dejavu.planning.question import Question

StageKind: TypeAlias = Literal["prompt", "token", "colocated"]
SWAPPED_MICROBATCHES = 2
"""KV of so many microbatches lies on a device that swaps: the one computed and the one coming or going."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """One stage, on one machine."""

    pipeline: StageKind
    stage: int
    layers: LayerRange
    weight_bytes: int
    """Embedding and head included."""
    kv_bytes: int
    """On the devices."""
    host_kv_bytes: int
    """In host memory, of a stage that swaps."""
    machine_bytes: int | None
    """None: no limit is checked."""

    @property
    def device_bytes(self) -> int:
        """What the devices must hold."""
        return self.weight_bytes + self.kv_bytes

    @property
    def fits(self) -> bool:
        """The devices hold it. The formulas take layers in fractions and leave out embedding and head."""
        return self.machine_bytes is None or self.device_bytes <= self.machine_bytes


def memory_table(question: Question, candidate: Candidate) -> tuple[StageBytes, ...]:
    """A row a stage, prompt stages first."""
    if candidate.mode == "colocated":
        return _pipeline(question, candidate, "colocated", candidate.prompt_depth)
    return (
        *_pipeline(question, candidate, "prompt", candidate.prompt_depth),
        *_pipeline(question, candidate, "token", candidate.token_depth),
    )


def most_rows(question: Question, candidate: Candidate, *, swapping: bool) -> int | None:
    """The most rows of a microbatch with which every stage of these pipelines fits; None: nothing limits them."""
    found = []
    for stage in memory_table(question, replace(candidate, rows=1, swapping=swapping)):
        if stage.machine_bytes is not None and stage.kv_bytes:
            found.append(max(0, (stage.machine_bytes - stage.weight_bytes) // stage.kv_bytes))
        if question.machines.host_memory_bytes is not None and stage.host_kv_bytes:
            found.append(question.machines.host_memory_bytes // stage.host_kv_bytes)
    return min(found, default=None)


def _pipeline(question: Question, candidate: Candidate, kind: StageKind, depth: int) -> tuple[StageBytes, ...]:
    ranges = balanced_layers(question.shape.num_layers, depth)
    return tuple(
        _stage(question, candidate, kind, index, layers, is_last=index == depth - 1, depth=depth)
        for index, layers in enumerate(ranges)
    )


def _stage(
    question: Question,
    candidate: Candidate,
    kind: StageKind,
    index: int,
    layers: LayerRange,
    *,
    is_last: bool,
    depth: int,
) -> StageBytes:
    shape, lengths = question.shape, question.lengths
    tokens = lengths.max_prompt_tokens + (0 if kind == "prompt" else lengths.max_new_tokens)
    a_microbatch = candidate.rows * tokens * len(layers) * shape.position_bytes
    swaps = candidate.swapping and kind != "prompt"
    in_flight = 1 if kind == "prompt" else depth
    return StageBytes(
        pipeline=kind,
        stage=index,
        layers=layers,
        weight_bytes=shape.weight_bytes(layers, is_first=index == 0, is_last=is_last),
        kv_bytes=a_microbatch * (SWAPPED_MICROBATCHES if swaps else in_flight),
        host_kv_bytes=a_microbatch * in_flight if swaps else 0,
        machine_bytes=question.machines.memory_bytes,
    )
