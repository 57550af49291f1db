"""What became of repairs, out of their journals: receipts for ``metrics.json``, spans for the timeline. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from dejavu.control.journal import Failure, RepairJournal, RestoreReceipt
from dejavu.report.repairs import FailureReceipt, RepairReceipt
from dejavu.report.spans import ArgValue, Span

CLUSTER_ROW = "cluster"
"""The name of the timeline's row for what concerns all workers."""


def receipts(journals: Sequence[RepairJournal]) -> list[RepairReceipt]:
    """A receipt for each journal, in their order."""
    return [_receipt(journal) for journal in journals]


def _receipt(journal: RepairJournal) -> RepairReceipt:
    times = _times(journal)
    steps = [_between(before, after) for before, after in pairwise(times)]
    restored = journal.receipt
    # With nobody who knows when it happened, the pause is told from the moment at which it was seen.
    begun_s = times[1] if times[0] is None else times[0]
    rows = {} if restored is None else {tier: number for tier, number in restored.rows.items() if number}
    return RepairReceipt(
        number=journal.number,
        epoch=journal.epoch,
        phase=journal.phase,
        failures=[
            FailureReceipt(worker=failure.worker, cause=failure.cause, reason=failure.reason)
            for failure in journal.failures
        ],
        how={str(worker): how for worker, how in journal.how.items()},
        replaced_by={str(dead): str(by) for dead, by in journal.replaced_by.items()},
        detection_s=steps[0],
        fence_s=steps[1],
        replace_s=steps[2],
        restore_s=steps[3],
        resume_s=steps[4],
        total_s=_between(begun_s, times[-1]),
        resume_steps={} if restored is None else dict(restored.resume_steps),
        steps_recomputed={} if restored is None else dict(restored.steps_recomputed),
        rows=rows,
        tier=None if not rows else next(iter(rows)) if len(rows) == 1 else "mixed",
        bytes_restored=0 if restored is None else restored.bytes_restored,
        bytes_replicated=0 if restored is None else restored.bytes_replicated,
        problem=journal.problem,
    )


def repair_spans(journals: Sequence[RepairJournal]) -> list[Span]:
    """For each repair a band of category ``recover`` over the whole of it, and one for each part that is over."""
    spans: list[Span] = []
    for journal in journals:
        times = _times(journal)
        known = [at for at in times if at is not None]
        if not known:
            continue
        spans.append(Span(f"repair {journal.number}", "recover", min(known), max(known) - min(known), _args(journal)))
        for name, (begun_s, ended_s) in zip(_PARTS, pairwise(times), strict=True):
            if begun_s is not None and ended_s is not None:
                spans.append(Span(name, "recover", begun_s, max(ended_s - begun_s, 0.0), {"repair": journal.number}))
    return spans


def with_repairs(workers: Mapping[str, Sequence[Span]], journals: Sequence[RepairJournal]) -> dict[str, Sequence[Span]]:
    """The timeline's rows: the workers', and above them the cluster's where anything was repaired."""
    bands = repair_spans(journals)
    return {**({CLUSTER_ROW: bands} if bands else {}), **workers}


_PARTS = ("detect", "fence", "replace", "restore", "resume")


def _times(journal: RepairJournal) -> list[float | None]:
    """When it happened, was seen, was fenced, was replaced, was restored, was resumed; None: unknown or not yet."""
    first = min(journal.failures, key=lambda failure: failure.seen_s, default=None)
    restored = journal.receipt
    return [
        _since(first, restored),
        None if first is None else first.seen_s,
        journal.fenced_s,
        journal.replaced_s,
        None if restored is None else restored.restored_s,
        None if restored is None else restored.resumed_s,
    ]


def _since(first: Failure | None, restored: RestoreReceipt | None) -> float | None:
    """When the failure happened. A lease says when a worker was missed: it had stopped before that, as tokens had."""
    if first is None or first.cause == "exit" or restored is None or restored.last_token_s is None:
        return None if first is None else first.since_s
    return min(first.seen_s if first.since_s is None else first.since_s, restored.last_token_s)


def _between(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _args(journal: RepairJournal) -> dict[str, ArgValue]:
    args: dict[str, ArgValue] = {
        "epoch": journal.epoch,
        "failed": ", ".join(f"{failure.worker} {failure.reason}" for failure in journal.failures),
        "how": ", ".join(f"{worker}: {how}" for worker, how in journal.how.items()),
        "phase": journal.phase,
    }
    if journal.problem is not None:
        args["problem"] = journal.problem
    return args
