"""The plan after a death: the same places with other workers, or fewer places. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from dejavu.control.layers import balanced_layers
from dejavu.control.memory import Limits, check_memory
from dejavu.control.placement import last_extra
from dejavu.control.plan import Fenced, Pipeline, PipelineKind, Plan, Stage
from dejavu.errors import InfeasibleError, InvalidTransition
from dejavu.ids import Epoch, IncarnationId, WorkerName
from dejavu.kv.layout import LayerRange

_MOST_FENCED = 64

Dead = Mapping[WorkerName, IncarnationId | None]
"""Workers declared dead, and which incarnation of each, where one is known."""
Crews = dict[PipelineKind, list[WorkerName]]
"""The workers of each pipeline that computes, in stage order."""


def replaced(plan: Plan, dead: Dead, by: Mapping[WorkerName, WorkerName]) -> Plan:
    """The plan of the next epoch, in which each dead worker's place belongs to ``by[worker]``; layers stay.

    ``by[worker]`` is a standby, which leaves the plan's list, or ``worker`` itself: a new process of that name. A dead
    standby stays listed, since a new process of its name may come.

    Raises:
        InvalidTransition: a dead worker with a place has no replacement, a worker that lives is replaced, or a name
            would have two places.
    """
    orphaned = [worker for worker in plan.workers if worker in dead and worker not in by]
    if orphaned:
        raise InvalidTransition(f"epoch {plan.epoch}: nobody replaces {', '.join(orphaned)}, dead with a place")
    alive = [worker for worker in by if worker not in dead]
    if alive:
        raise InvalidTransition(f"epoch {plan.epoch}: {', '.join(alive)} would be replaced without being dead")
    pipelines = tuple(_with_workers(pipeline, by) for pipeline in plan.pipelines)
    names = [stage.worker for pipeline in pipelines for stage in pipeline.stages]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise InvalidTransition(f"epoch {plan.epoch}: {', '.join(doubled)} would have two places")
    return msgspec.structs.replace(
        plan,
        epoch=Epoch(plan.epoch + 1),
        pipelines=pipelines,
        standby=tuple(name for name in plan.standby if name not in names),
        fenced=_fenced(plan, dead),
    )


def shrunk(plan: Plan, dead: Dead, *, limits: Limits | None = None) -> Plan:
    """The plan of the next epoch without the dead and without a new worker.

    Standbys that live take the places of the dead first. What is still without a worker goes: its layers are cut anew
    onto the survivors of its pipeline, who keep their order, so that pools change little; a pipeline that keeps its
    depth keeps its layers. A pipeline that lost all takes the last stage's worker of the other one, and where that one
    has only one, the mode becomes colocated. A memory stage that no standby replaces is given up, and with it
    ``stream_to``: copies are not worth a stage that computes. The token pipeline's ``in_flight`` and
    ``microbatch_rows`` stay, so rows keep their places. The dead are listed no more, on standby neither.

    Raises:
        InfeasibleError: nobody who computes survives, or a survivor's part is more than ``limits``.
    """
    by = _places_of_standbys(plan, dead)
    filled = [_with_workers(pipeline, by) for pipeline in plan.pipelines]
    crews: Crews = {
        pipeline.kind: [stage.worker for stage in pipeline.stages if stage.worker not in dead]
        for pipeline in filled
        if pipeline.kind != "memory"
    }
    crews = _shared_out(plan, crews)
    memory = [
        pipeline
        for pipeline in filled
        if pipeline.kind == "memory" and not any(stage.worker in dead for stage in pipeline.stages)
    ]
    pipelines = [_crewed(plan, kind, crew) for kind, crew in crews.items()]
    shorter = msgspec.structs.replace(
        plan,
        epoch=Epoch(plan.epoch + 1),
        mode="colocated" if "colocated" in crews else "disaggregated",
        pipelines=(*pipelines, *memory),
        stream_to=None if plan.memory_stages and not memory else plan.stream_to,
        replication=min(plan.replication, _keeps_rows(pipelines).depth - 1),
        standby=tuple(name for name in plan.standby if name not in dead and name not in by.values()),
        fenced=_fenced(plan, dead),
    )
    if limits is not None:
        check_memory(shorter, limits)
    return shorter


def _places_of_standbys(plan: Plan, dead: Dead) -> dict[WorkerName, WorkerName]:
    """Which dead worker's place each living standby takes.

    One of a pipeline that lost all comes first, so that it takes nobody's worker; then the stages that keep rows, then
    prompt stages, then memory.
    """
    order: tuple[PipelineKind, ...] = ("token", "colocated", "prompt", "memory")
    pipelines = sorted(plan.pipelines, key=lambda pipeline: order.index(pipeline.kind))
    lost_whole = [
        pipeline.stages[0].worker
        for pipeline in pipelines
        if pipeline.kind != "memory" and all(stage.worker in dead for stage in pipeline.stages)
    ]
    lost = [stage.worker for pipeline in pipelines for stage in pipeline.stages if stage.worker in dead]
    standbys = [name for name in plan.standby if name not in dead]
    return dict(zip(dict.fromkeys((*lost_whole, *lost)), standbys, strict=False))


def _shared_out(plan: Plan, crews: Crews) -> Crews:
    """The same workers with no pipeline left empty, or all of them in one colocated pipeline."""
    survivors = [worker for crew in crews.values() for worker in crew]
    if not survivors:
        num_dead = len(plan.workers) - len(plan.memory_stages)
        raise InfeasibleError(
            f"infeasible: all {num_dead} workers that compute in epoch {plan.epoch} are dead, and 0 standbys live\n"
            "allow new processes, or give standbys (strategy.standby)"
        )
    if all(crews.values()):
        return crews
    if len(survivors) == 1:
        return {"colocated": survivors}
    return {kind: crew[:-1] if crew else survivors[-1:] for kind, crew in crews.items()}


def _crewed(plan: Plan, kind: PipelineKind, crew: Sequence[WorkerName]) -> Pipeline:
    """The plan's pipeline of that kind with these workers, cut anew where their number differs."""
    pipeline = plan.prompt_pipeline if kind == "prompt" else plan.token_pipeline
    layers: Sequence[LayerRange] = [stage.layers for stage in pipeline.stages]
    if pipeline.depth != len(crew):
        layers = balanced_layers(plan.model.num_layers, len(crew), last_extra=last_extra(kind, plan.model))
    stages = tuple(
        Stage(worker=worker, index=index, layers=cut)
        for index, (worker, cut) in enumerate(zip(crew, layers, strict=True))
    )
    return msgspec.structs.replace(pipeline, kind=kind, stages=stages)


def _keeps_rows(pipelines: Sequence[Pipeline]) -> Pipeline:
    return next(pipeline for pipeline in pipelines if pipeline.kind in ("token", "colocated"))


def _with_workers(pipeline: Pipeline, by: Mapping[WorkerName, WorkerName]) -> Pipeline:
    """The pipeline with other workers in the places that ``by`` names."""
    stages = tuple(
        msgspec.structs.replace(stage, worker=by.get(stage.worker, stage.worker)) for stage in pipeline.stages
    )
    return msgspec.structs.replace(pipeline, stages=stages)


def _fenced(plan: Plan, dead: Dead) -> tuple[Fenced, ...]:
    """The fenced incarnations and those of the dead that are known, the newest 64."""
    new = [
        Fenced(worker=worker, incarnation=incarnation)
        for worker, incarnation in dead.items()
        if incarnation is not None
    ]
    return (*(one for one in plan.fenced if one not in new), *new)[-_MOST_FENCED:]
