"""What each stage of a candidate holds, as the cluster itself would cut and count it, beside what its machine has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from dejavu.control import memory as cluster_memory
from dejavu.control.memory import Limits, check_memory, stage_memory
from dejavu.control.placement import Declared, place
from dejavu.control.plan import Pipeline, Place, Plan, Stage
from dejavu.errors import InfeasibleError
from dejavu.ids import FIRST_EPOCH
from dejavu.kv.layout import LayerRange
from dejavu.planning.candidates import Candidate
from dejavu.planning.question import Question
from dejavu.planning.shape import spec_of_shape

StageKind: TypeAlias = Literal["prompt", "token", "colocated"]


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
        """The devices hold it."""
        return self.machine_bytes is None or self.device_bytes <= self.machine_bytes


def placed(question: Question, candidate: Candidate) -> Plan:
    """The plan that a cluster would make of the candidate, without a look at its memory."""
    declared = Declared(
        mode=candidate.mode,
        prompt_depth=candidate.prompt_depth,
        token_depth=candidate.token_depth,
        colocated_depth=candidate.prompt_depth,
        prompt_rows=question.prompt_rows_of(candidate.rows),
        token_rows=candidate.rows,
        in_flight=candidate.in_flight,
        scheduling=question.scheduling,
        swapping=candidate.swapping,
    )
    return place(declared, spec_of_shape(question.shape), epoch=FIRST_EPOCH)


def limits(question: Question) -> Limits:
    """What a worker has."""
    return Limits(device_bytes=question.machines.memory_bytes, host_bytes=question.machines.host_memory_bytes)


def memory_objection(question: Question, candidate: Candidate) -> str | None:
    """Which stage does not fit, with the bytes; None: all do. What ``place`` says is what is said here."""
    checked = limits(question)
    if checked == Limits():
        return None
    try:
        check_memory(placed(question, candidate), checked)
    except InfeasibleError as error:
        return str(error).partition("\n")[0].removeprefix("infeasible: ")
    return None


def memory_table(question: Question, candidate: Candidate) -> tuple[StageBytes, ...]:
    """A row a stage, prompt stages first."""
    plan = placed(question, candidate)
    return tuple(_stage(question, plan, pipeline, stage) for pipeline in plan.pipelines for stage in pipeline.stages)


def most_rows(question: Question, candidate: Candidate, *, swapping: bool) -> int | None:
    """The most rows of a token microbatch with which every stage that keeps rows fits; None: nothing limits them."""
    plan = placed(question, replace(candidate, swapping=swapping))
    return cluster_memory.most_rows(plan, limits(question), swapping=swapping)


def _stage(question: Question, plan: Plan, pipeline: Pipeline, stage: Stage) -> StageBytes:
    need = stage_memory(plan, Place(pipeline=pipeline, stage=stage))
    kind = pipeline.kind
    assert kind != "memory"
    return StageBytes(
        pipeline=kind,
        stage=stage.index,
        layers=stage.layers,
        weight_bytes=need.weight_bytes,
        kv_bytes=need.kv_bytes,
        host_kv_bytes=need.host_kv_bytes,
        machine_bytes=question.machines.memory_bytes,
    )
