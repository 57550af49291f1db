"""The plan that answers a change of the declared state of a running cluster. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

import msgspec

from dejavu.control.memory import Limits, check_memory, check_moving
from dejavu.control.plan import Plan
from dejavu.errors import ConfigError
from dejavu.ids import Epoch, WorkerName
from dejavu.kv.levels import StreamingLevel

_ROWS_OF_A_REHEARSAL = "a rehearsal has times for the microbatches that it began with"


def changed_plan(plan: Plan, wanted: Mapping[str, object], *, revision: int, may_grow: bool, limits: Limits) -> Plan:
    """The plan of the next epoch with these values in the place of the present ones; nobody is dead, no layer moves.

    It starts from the plan in force, whatever repairs have made of it.

    Args:
        wanted: by key of the declaration, one of ``LIVE`` each; of the declared types.
        revision: of the declared state that asks for it.
        may_grow: whether processes may be started for more standbys.

    Raises:
        ConfigError: the plan in force does not allow it; key, value and limit are named.
        InfeasibleError: a stage does not fit the memory; bytes named.
    """
    after = plan
    for key, value in wanted.items():
        after = LIVE[key](after, value)
    _check(plan, after, wanted, may_grow=may_grow)
    after = msgspec.structs.replace(after, epoch=Epoch(plan.epoch + 1), revision=revision)
    check_memory(after, limits)
    check_moving(plan, after, limits)
    return after


def _with_in_flight(plan: Plan, value: Any) -> Plan:
    number = _default_in_flight(plan) if value is None else int(value)
    return _with_rows(plan, in_flight=number)


def _with_token_rows(plan: Plan, value: Any) -> Plan:
    return _with_rows(plan, microbatch_rows=int(value))


def _with_prompt_rows(plan: Plan, value: Any) -> Plan:
    rows = int(value)
    pipelines = tuple(
        msgspec.structs.replace(pipeline, microbatch_rows=rows) if pipeline.kind == "prompt" else pipeline
        for pipeline in plan.pipelines
    )
    return msgspec.structs.replace(plan, pipelines=pipelines, prompt_rows=rows)


def _with_standby(plan: Plan, value: Any) -> Plan:
    number = int(value)
    names = plan.standby[:number]
    more = _new_names(plan)
    return msgspec.structs.replace(plan, standby=(*names, *(next(more) for _ in range(number - len(names)))))


def _with_streaming(plan: Plan, value: Any) -> Plan:
    return msgspec.structs.replace(plan, streaming=StreamingLevel(value))


def _field(name: str) -> Callable[[Plan, Any], Plan]:
    """The plan has a field of that name for the value as it is."""
    return lambda plan, value: msgspec.structs.replace(plan, **{name: value})


LIVE: Mapping[str, Callable[[Plan, Any], Plan]] = {
    "strategy.in_flight": _with_in_flight,
    "strategy.microbatch.prompt": _with_prompt_rows,
    "strategy.microbatch.prompt_tokens": _field("prompt_tokens"),
    "strategy.microbatch.token": _with_token_rows,
    "strategy.replication": _field("replication"),
    "strategy.copy_steps": _field("copy_steps"),
    "strategy.recovery": _field("recovery"),
    "strategy.streaming": _with_streaming,
    "strategy.standby": _with_standby,
}
"""What can change while a cluster runs, and what it changes in the plan."""


def _with_rows(plan: Plan, **shape: int) -> Plan:
    """The rows of the pipeline that keeps them, and of a memory stage that has copies of all of them."""
    pipelines = tuple(
        msgspec.structs.replace(pipeline, **shape) if pipeline.kind != "prompt" else pipeline
        for pipeline in plan.pipelines
    )
    return msgspec.structs.replace(plan, pipelines=pipelines)


def _default_in_flight(plan: Plan) -> int:
    """As for a declaration that does not say it; see ``Declared.num_in_flight``."""
    depth = plan.token_pipeline.depth
    if plan.mode == "disaggregated" and plan.scheduling == "microbatch":
        return plan.prompt_pipeline.depth + depth
    return depth


def _new_names(plan: Plan) -> Iterator[WorkerName]:
    used = {*plan.workers, *plan.standby}
    return (name for number in count() if (name := WorkerName(f"w{number}")) not in used)


def _check(before: Plan, after: Plan, wanted: Mapping[str, object], *, may_grow: bool) -> None:
    depth = after.token_pipeline.depth
    if not 0 <= after.replication < depth:
        raise ConfigError(
            f"strategy.replication={after.replication}: must be from 0 to {depth - 1}: "
            f"the pipeline that keeps rows has {depth} stage{'' if depth == 1 else 's'} now"
        )
    if after.streaming is StreamingLevel.off and (after.replication or after.mode == "disaggregated"):
        raise ConfigError("strategy.streaming=off: KV goes from stage to stage in this cluster")
    if len(after.standby) > len(before.standby) and not may_grow:
        raise ConfigError(
            f"strategy.standby={len(after.standby)}: there are {len(before.standby)} now, "
            "and strategy.may_grow=false allows no new process"
        )
    rows = [key for key in wanted if key.startswith("strategy.microbatch.")]
    if rows and before.model.modelled is not None:
        raise ConfigError(f"{rows[0]}={wanted[rows[0]]}: {_ROWS_OF_A_REHEARSAL}")
