"""What each stage of a plan must hold on its device and in its host, and the largest microbatch that fits. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dejavu.control.plan import Place, Plan
from dejavu.errors import InfeasibleError
from dejavu.ids import WorkerName

SWAPPED_MICROBATCHES = 2
"""On the device of a stage that swaps: the one computed, and the one coming or going."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one stage."""

    weight_bytes: int
    kv_bytes: int
    """On the device."""
    host_kv_bytes: int = 0
    """In host memory, of a stage that swaps."""

    @property
    def total_bytes(self) -> int:
        """Weights and KV on the device together."""
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Memory that each worker has; None: not checked."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    """For KV."""


def stage_memory(plan: Plan, place: Place) -> StageMemory:
    """What the stage needs: its weights, and KV for its pipeline's rows (for a prompt stage, of one microbatch).

    A memory stage has no weights, and its KV lies in host memory. Of a rehearsal it is what the model itself needs.
    """
    pipeline = place.pipeline
    if pipeline.kind == "memory":
        return StageMemory(weight_bytes=0, kv_bytes=0)
    row_bytes = _row_bytes(plan, place)
    weight_bytes = plan.model.weight_bytes(place.stage.layers, first=place.is_first, last=place.is_last)
    if pipeline.kind == "prompt":
        return StageMemory(weight_bytes=weight_bytes, kv_bytes=round(plan.prompt_rows * row_bytes))
    all_bytes = round(pipeline.num_rows * row_bytes)
    if not plan.swapping:
        return StageMemory(weight_bytes=weight_bytes, kv_bytes=all_bytes)
    slot_bytes = round(SWAPPED_MICROBATCHES * pipeline.microbatch_rows * row_bytes)
    return StageMemory(weight_bytes=weight_bytes, kv_bytes=slot_bytes, host_kv_bytes=all_bytes)


def most_rows(plan: Plan, limits: Limits, *, swapping: bool) -> int | None:
    """The most rows of a token microbatch with which every stage that keeps rows fits; None: nothing limits them."""
    pipeline = plan.token_pipeline
    on_device = SWAPPED_MICROBATCHES if swapping else pipeline.in_flight
    found: list[int] = []
    for stage in pipeline.stages:
        place = Place(pipeline=pipeline, stage=stage)
        row_bytes = _row_bytes(plan, place)
        if limits.device_bytes is not None:
            left_bytes = limits.device_bytes - stage_memory(plan, place).weight_bytes
            found.append(max(0, int(left_bytes // (on_device * row_bytes))))
        if limits.host_bytes is not None and swapping:
            found.append(int(limits.host_bytes // (pipeline.in_flight * row_bytes)))
    return min(found) if found else None


def fits(plan: Plan, limits: Limits) -> bool:
    """Every stage fits."""
    try:
        check_memory(plan, limits)
    except InfeasibleError:
        return False
    return True


def check_memory(plan: Plan, limits: Limits) -> None:
    """Every stage fits. Raises InfeasibleError naming the stage, the bytes, and the largest microbatch that fits."""
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            need = stage_memory(plan, Place(pipeline=pipeline, stage=stage))
            who = f"{pipeline.kind} stage {stage.index} (layers [{stage.layers.start}, {stage.layers.stop}))"
            if limits.device_bytes is not None and need.total_bytes > limits.device_bytes:
                slots = " in two slots" if need.host_kv_bytes else ""
                raise InfeasibleError(
                    f"infeasible: {who} needs {_mib(need.total_bytes)} ({_mib(need.weight_bytes)} weights, "
                    f"{_mib(need.kv_bytes)} KV{slots}), but cluster.device_memory_gb gives {_mib(limits.device_bytes)}"
                    f"\n{_remedy(plan, limits)}"
                )
            if limits.host_bytes is not None and need.host_kv_bytes > limits.host_bytes:
                raise InfeasibleError(
                    f"infeasible: {who} keeps {_mib(need.host_kv_bytes)} of KV in host memory, but "
                    f"cluster.host_memory_gb gives {_mib(limits.host_bytes)}\n{_remedy(plan, limits)}"
                )


def check_moving(before: Plan, after: Plan, limits: Limits, *, fresh: Collection[WorkerName] = ()) -> None:
    """Every stage of ``after`` fits beside the pool that its worker had before, out of which rows move.

    A pool of the same layers and rows stays as it is, and ``fresh`` workers have none yet. Raises InfeasibleError
    naming worker, bytes and limit.
    """
    for worker in after.workers:
        former, place = None if worker in fresh else before.place_of(worker), after.place_of(worker)
        if former is None or place is None or not _keeps_rows(former) or _has_same_pool(former, place):
            continue
        old, new = stage_memory(before, former), stage_memory(after, place)
        # Slots are given up before new ones are taken, since nothing in them is needed any more.
        on_device = new.total_bytes + (0 if before.swapping else old.kv_bytes)
        checks = (
            ("device", on_device, limits.device_bytes),
            ("host", new.host_kv_bytes + old.host_kv_bytes, limits.host_bytes),
        )
        for where, need_bytes, limit_bytes in checks:
            if limit_bytes is not None and need_bytes > limit_bytes:
                raise InfeasibleError(
                    f"infeasible: while rows move, {worker} needs {_mib(need_bytes)} for their former places and the "
                    f"new ones, but cluster.{where}_memory_gb gives {_mib(limit_bytes)}"
                )


def _keeps_rows(place: Place) -> bool:
    return place.pipeline.kind in ("token", "colocated")


def _has_same_pool(former: Place, place: Place) -> bool:
    old, new = former.pipeline, place.pipeline
    is_same_shape = (old.in_flight, old.microbatch_rows) == (new.in_flight, new.microbatch_rows)
    return _keeps_rows(place) and is_same_shape and former.stage.layers == place.stage.layers


def _remedy(plan: Plan, limits: Limits) -> str:
    declared, in_flight = plan.token_pipeline.microbatch_rows, plan.token_pipeline.in_flight
    without, swapped = (most_rows(plan, limits, swapping=swapping) for swapping in (False, True))
    return (
        "use more stages, fewer rows (strategy.microbatch, strategy.in_flight) or a lower model.max_length\n"
        f"with {in_flight} microbatches in flight, strategy.microbatch.token={declared} can be at most {without} with "
        f"strategy.swapping=off, and {swapped} with strategy.swapping=on"
    )


def _row_bytes(plan: Plan, place: Place) -> float:
    return plan.model.layout.row_bytes(len(place.stage.layers)) / plan.model.kv_scale


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
