"""How a cluster stands, out of its keys in the store. Pure: what it cannot read, it tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from dejavu.control.journal import RepairJournal
from dejavu.control.member import Member
from dejavu.control.plan import Pipeline, Plan
from dejavu.control.receipts import receipts
from dejavu.control.spec_change import SpecChange
from dejavu.report.cluster_status import (
    ABSENT,
    DEAD,
    JOINING,
    ChangeStatus,
    ClusterStatus,
    ConditionStatus,
    ControllerStatus,
    PipelineStatus,
    StageStatus,
    WorkerStatus,
)
from dejavu.store.keys import Keys

T = TypeVar("T")


def standing(keys: Keys, values: Mapping[str, bytes]) -> ClusterStatus:
    """The status of the cluster whose keys and values these are."""
    reader = _Reader(values)
    plan = reader.read(keys.plan, Plan)
    members = _members(keys, reader)
    named = set() if plan is None else {*plan.workers, *plan.standby}
    return ClusterStatus(
        cluster=keys.cluster,
        epoch=None if plan is None else plan.epoch,
        mode=None if plan is None else plan.mode,
        model=None if plan is None else plan.model.folder,
        replication=None if plan is None else plan.replication,
        controller=reader.read(keys.controller, ControllerStatus),
        conditions=reader.read(keys.status, dict[str, ConditionStatus]) or {},
        pipelines=() if plan is None else _pipelines(plan, members, _copied(keys, plan, reader)),
        standby=() if plan is None else tuple(_worker(name, members, plan) for name in plan.standby),
        others=tuple(_worker(name, members, plan) for name in sorted(members) if name not in named),
        num_fenced=0 if plan is None else len(plan.fenced),
        repairs=tuple(receipts(_journals(keys, reader))),
        revision=None if plan is None else plan.revision,
        changes=_changes(keys, reader),
        unreadable=reader.unreadable,
    )


def state_in(plan: Plan | None, member: Member | None) -> str:
    """How a worker stands to the plan in force; see ``WorkerStatus.state``."""
    if member is None:
        return ABSENT
    if plan is not None and any(
        one.worker == member.name and one.incarnation == member.incarnation for one in plan.fenced
    ):
        return DEAD
    is_behind = plan is not None and member.state == "serving" and member.epoch != plan.epoch
    return JOINING if is_behind else member.state


def clusters_of(keys: Sequence[str]) -> list[str]:
    """The names of the clusters that have one of these keys, in order."""
    names = {parts[2] for parts in (key.split("/") for key in keys) if len(parts) > 3 and parts[1] == "dejavu"}
    return sorted(names)


@dataclass(slots=True)
class _Reader:
    values: Mapping[str, bytes]
    unreadable: dict[str, str] = field(default_factory=dict)

    def read(self, key: str, kind: type[T]) -> T | None:
        """The value of ``key``, or None where there is none or it is none of ours."""
        value = self.values.get(key)
        if value is None:
            return None
        try:
            return msgspec.json.decode(value, type=kind)
        # A value that decodes may still be refused by what it is made of.
        except (msgspec.DecodeError, ValueError) as error:
            self.unreadable[key] = str(error)
            return None


def _members(keys: Keys, reader: _Reader) -> dict[str, Member]:
    named = [key for key in reader.values if keys.worker_of(key) is not None]
    members = [reader.read(key, Member) for key in named]
    return {str(member.name): member for member in members if member is not None}


def _journals(keys: Keys, reader: _Reader) -> list[RepairJournal]:
    numbered = sorted((number, key) for key in reader.values if (number := keys.repair_of(key)) is not None)
    journals = [reader.read(key, RepairJournal) for _, key in numbered]
    return [journal for journal in journals if journal is not None]


def _changes(keys: Keys, reader: _Reader) -> tuple[ChangeStatus, ...]:
    numbered = sorted((number, key) for key in reader.values if (number := keys.change_of(key)) is not None)
    changes = [reader.read(key, SpecChange) for _, key in numbered]
    return tuple(
        ChangeStatus(
            revision=change.revision,
            what=change.text,
            phase=change.phase,
            asked_s=change.asked_s,
            epoch=change.epoch,
            reason=change.reason,
        )
        for change in changes
        if change is not None
    )


def _copied(keys: Keys, plan: Plan, reader: _Reader) -> dict[int, dict[str, int]]:
    """By stage of the pipeline that makes tokens: what the store says of its copies."""
    pipeline = plan.token_pipeline
    acks = {
        stage.index: reader.read(keys.acks(pipeline.kind, stage.index), dict[str, int]) for stage in pipeline.stages
    }
    # A microbatch may have been given up by a change of the declared state.
    present = {str(index) for index in range(pipeline.in_flight)}
    kept = {
        index: {key: step for key, step in (steps or {}).items() if key in present} for index, steps in acks.items()
    }
    return {index: steps for index, steps in kept.items() if steps}


def _pipelines(
    plan: Plan, members: Mapping[str, Member], copied: Mapping[int, dict[str, int]]
) -> tuple[PipelineStatus, ...]:
    makers = plan.token_pipeline
    return tuple(
        PipelineStatus(
            kind=pipeline.kind,
            microbatch_rows=pipeline.microbatch_rows,
            in_flight=pipeline.in_flight,
            stages=_stages(plan, pipeline, members, copied if pipeline is makers else {}),
        )
        for pipeline in plan.pipelines
    )


def _stages(
    plan: Plan, pipeline: Pipeline, members: Mapping[str, Member], copied: Mapping[int, dict[str, int]]
) -> tuple[StageStatus, ...]:
    return tuple(
        StageStatus(
            stage=stage.index,
            layers=(stage.layers.start, stage.layers.stop),
            worker=_worker(stage.worker, members, plan),
            copied=copied.get(stage.index, {}),
        )
        for stage in pipeline.stages
    )


def _worker(name: str, members: Mapping[str, Member], plan: Plan | None) -> WorkerStatus:
    member = members.get(name)
    if member is None:
        return WorkerStatus(name=name, state=ABSENT)
    return WorkerStatus(
        name=name,
        state=state_in(plan, member),
        epoch=member.epoch,
        incarnation=member.incarnation,
        host=member.host,
        pid=member.pid,
        address=member.address,
        device=member.device,
        memory_bytes=member.memory_bytes,
        problem=member.problem,
    )
