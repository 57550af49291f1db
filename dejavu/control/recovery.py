"""How each open row goes on after a failure, and which copies must be made again. Pure: facts in, decisions out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from dejavu.control.holdings import CopyAgain, Fetch, HeldRow, RowProgress, RowRestore
from dejavu.control.plan import Plan, Stage
from dejavu.ids import RowId, WorkerName
from dejavu.kv.layout import LayerRange

_ALWAYS_REPLAYED = 4
_REPLAYED_SHARE = 8
"""A step made again costs a step of its whole microbatch; a prompt pass computes 512 tokens in the time of about 110
steps (DejaVu's Y/t, as measured with SmolLM2 on one core). So replaying is the shorter way for up to about a fifth of
a row; an eighth is allowed, and a few steps always, since a prompt pass also waits for its turn."""


@dataclass(frozen=True, slots=True)
class _Source:
    """One row's cells in one place of one worker."""

    worker: WorkerName
    held: HeldRow


def restore_of(
    plan: Plan, holdings: Mapping[WorkerName, Sequence[HeldRow]], rows: Sequence[RowProgress]
) -> tuple[RowRestore, ...]:
    """One decision for each row, in order: the best tier that ``plan.recovery`` and the surviving cells allow.

    A row of tier ``replica`` goes on from a length that for every layer some holder has, after fetches that leave each
    token stage with all of its layers up to it. Where too much would be made again step by step, or where the prompt's
    own cells are not all there, it is recomputed.

    Args:
        plan: the new plan.
        holdings: what each live worker holds, as cut by any earlier plan; rows that are not open are ignored.
        rows: the open rows.
    """
    sources = _sources_by_row(holdings)
    return tuple(_restore(plan, row, sources.get(row.row_id, ())) for row in rows)


def copies_again(
    plan: Plan, holdings: Mapping[WorkerName, Sequence[HeldRow]], restores: Sequence[RowRestore]
) -> tuple[CopyAgain, ...]:
    """The positions that each token stage sends again, once restored, so that all of its holders have its rows.

    A copy counts as far as one store of the holder has all of the stage's layers: a store that was cut for other
    layers takes no more of them. Only rows of tier ``replica``: prompts and steps of the others are streamed as ever.
    """
    sources = _sources_by_row(holdings)
    again = []
    for restore in restores:
        if restore.tier != "replica":
            continue
        for stage in plan.token_pipeline.stages:
            have = _copied_length(plan, stage, sources.get(restore.row_id, ()))
            if have is not None and have < restore.length:
                again.append(CopyAgain(worker=stage.worker, row_id=restore.row_id, start=have, stop=restore.length))
    return tuple(again)


def restored_bytes(plan: Plan, restores: Sequence[RowRestore]) -> int:
    """Bytes of K and V that all fetches together bring."""
    cells = sum(len(fetch.layers) * fetch.length for restore in restores for fetch in restore.fetches)
    return cells * plan.model.layout.position_bytes


def copied_bytes(plan: Plan, copies: Sequence[CopyAgain]) -> int:
    """Bytes of K and V that are sent again, each holder counted."""
    stages = {stage.worker: stage for stage in plan.token_pipeline.stages}
    cells = sum(
        len(stages[copy.worker].layers) * (copy.stop - copy.start) * len(_holders_of(plan, stages[copy.worker]))
        for copy in copies
    )
    return cells * plan.model.layout.position_bytes


def _restore(plan: Plan, row: RowProgress, sources: Sequence[_Source]) -> RowRestore:
    if plan.recovery == "restart":
        return RowRestore(row_id=row.row_id, tier="restart", length=0, replayed=row.num_tokens)
    length = _common_length(plan, row, sources)
    replayed = row.num_cells - length
    if (
        plan.recovery == "recompute"
        or length < max(1, row.num_prompt - 1)
        or replayed > max(_ALWAYS_REPLAYED, plan.copy_steps + 2, (row.num_prompt + row.num_tokens) // _REPLAYED_SHARE)
    ):
        return RowRestore(row_id=row.row_id, tier="recompute", length=0, replayed=0)
    whole = [source for source in sources if source.held.length >= length]
    fetches = [fetch for stage in plan.token_pipeline.stages for fetch in _fetches(stage, row.row_id, length, whole)]
    return RowRestore(row_id=row.row_id, tier="replica", length=length, replayed=replayed, fetches=tuple(fetches))


def _common_length(plan: Plan, row: RowProgress, sources: Sequence[_Source]) -> int:
    """The longest [0, length) that for every layer lies somewhere, at most what the next step needs."""
    return min(
        row.num_cells,
        *(
            max((source.held.length for source in sources if layer in source.held.layers), default=0)
            for layer in range(plan.model.num_layers)
        ),
    )


def _fetches(stage: Stage, row_id: RowId, length: int, whole: Sequence[_Source]) -> list[Fetch]:
    """What the stage must be sent, out of sources that all hold [0, length) of their layers; nothing if it has it."""
    if any(
        source.worker == stage.worker
        and not source.held.is_copy
        and source.held.in_place
        and source.held.layers == stage.layers
        for source in whole
    ):
        return []
    chosen = [(layer, _nearest_source(stage, layer, whole)) for layer in stage.layers.indices]
    fetches = []
    for source, run in groupby(chosen, key=lambda pair: pair[1]):
        layers = [layer for layer, _ in run]
        fetches.append(
            Fetch(
                row_id=row_id,
                source=source.worker,
                is_copy=source.held.is_copy,
                target=stage.worker,
                layers=LayerRange(layers[0], layers[-1] + 1),
                length=length,
            )
        )
    return fetches


def _nearest_source(stage: Stage, layer: int, whole: Sequence[_Source]) -> _Source:
    """Who serves the layer: the stage's own worker, else a pool rather than a copy, else whoever serves most of it."""

    def rank(source: _Source) -> tuple[bool, bool, int, str, int]:
        held = source.held
        num_served = min(held.layers.stop, stage.layers.stop) - max(held.layers.start, stage.layers.start)
        return source.worker != stage.worker, held.is_copy, -num_served, source.worker, held.layers.start

    return min((source for source in whole if layer in source.held.layers), key=rank)


def _copied_length(plan: Plan, stage: Stage, sources: Sequence[_Source]) -> int | None:
    """What the worst of the stage's holders has of a row; None where nobody is to hold a copy."""
    lengths = [
        max(
            (
                source.held.length
                for source in sources
                if source.worker == holder and source.held.is_copy and _contains(source.held.layers, stage.layers)
            ),
            default=0,
        )
        for holder in _holders_of(plan, stage)
    ]
    return min(lengths, default=None)


def _holders_of(plan: Plan, stage: Stage) -> tuple[WorkerName, ...]:
    """Everyone who is to hold a copy of the stage's rows, once."""
    holders = (*plan.successors_of(stage.worker), *plan.memory_stages)
    return tuple(name for name in dict.fromkeys(holder.worker for holder in holders) if name != stage.worker)


def _contains(outer: LayerRange, inner: LayerRange) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def _sources_by_row(holdings: Mapping[WorkerName, Sequence[HeldRow]]) -> dict[RowId, list[_Source]]:
    sources: dict[RowId, list[_Source]] = {}
    for worker, held_rows in holdings.items():
        for held in held_rows:
            sources.setdefault(held.row_id, []).append(_Source(worker, held))
    return sources
