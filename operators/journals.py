"""Journals of repairs: in the store for people, in the log as a line a phase, in the status as a reason. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dejavu.control.journal import Failure, RepairJournal, RestoreReceipt
from dejavu.control.member import encode_json
from operators.actions import Action, DropJournal, PutJournal
from operators.observation import Observed

KEPT = 32
"""The newest journals that the store keeps: each look at the cluster reads them all."""


def decide(journals: Sequence[RepairJournal], observed: Observed) -> tuple[Action, ...]:
    """Put the newest journals that the store has not or has otherwise; drop the others. Nothing without a store."""
    if observed.members is None:
        return ()
    wanted = {journal.number: encode_json(journal) for journal in journals[-KEPT:]}
    puts = [PutJournal(number=n, value=value) for n, value in wanted.items() if observed.journals.get(n) != value]
    drops = [DropJournal(number=number) for number in observed.journals if number not in wanted]
    return (*puts, *drops)


def news(before: Sequence[RepairJournal], after: Sequence[RepairJournal]) -> tuple[RepairJournal, ...]:
    """The journals that are new or have changed, in order."""
    old = {journal.number: journal for journal in before[-1:]}
    return tuple(journal for journal in after[max(len(before) - 1, 0) :] if old.get(journal.number) != journal)


def headline(journal: RepairJournal) -> str:
    """Who died of what, and what is being done about it."""
    died = "; ".join(f"{failure.worker} {failure.reason}" for failure in journal.failures)
    return f"{died}: {journal.phase}"


def told(before: RepairJournal | None, after: RepairJournal) -> tuple[str, ...]:
    """What a reader of the log is told of the change, a line a phase."""
    return tuple(f"repair {after.number}: {text}" for text in _texts(before, after))


def _texts(before: RepairJournal | None, after: RepairJournal) -> Iterator[str]:
    for failure in after.failures[0 if before is None else len(before.failures) :]:
        yield _seen(failure)
    if after.fenced_s is not None and (before is None or before.fenced_s != after.fenced_s):
        yield f"fenced, epoch {after.epoch}"
    if after.replaced_s is not None and (before is None or before.replaced_s != after.replaced_s):
        took = "" if after.fenced_s is None else f" in {after.replaced_s - after.fenced_s:.2f} s"
        yield f"{_replaced(after)}{took}"
    if after.receipt is not None and (before is None or before.receipt is None):
        yield _restored(after, after.receipt)
        yield _resumed(after.receipt)
    if after.problem is not None:
        yield f"given up: {after.problem}"


def _seen(failure: Failure) -> str:
    died = f"{failure.worker} {failure.reason}"
    return died if failure.since_s is None else f"{died}, seen {max(failure.seen_s - failure.since_s, 0.0):.2f} s after"


def _replaced(journal: RepairJournal) -> str:
    parts: list[str] = []
    for name, how in journal.how.items():
        match how:
            case "standby" | "process":
                parts.append(f"{name} is replaced by {journal.replaced_by.get(name, name)} ({how})")
            case "replan":
                parts.append(f"{name} is not replaced, the others share its layers")
            case "links":
                parts.append(f"{name} is linked anew")
    return "; ".join(parts) or "formed"


def _restored(journal: RepairJournal, receipt: RestoreReceipt) -> str:
    rows = ", ".join(f"{count} by {tier}" for tier, count in sorted(receipt.rows.items()) if count) or "none open"
    took = "" if journal.replaced_s is None else f" in {receipt.restored_s - journal.replaced_s:.2f} s"
    return f"rows restored{took} ({rows})"


def _resumed(receipt: RestoreReceipt) -> str:
    again = sum(receipt.steps_recomputed.values())
    steps = sorted(set(receipt.resume_steps.values()))
    at = (
        f"resumed at step {'-'.join(str(step) for step in dict.fromkeys((steps[0], steps[-1])))}"
        if steps
        else "resumed"
    )
    return f"{at}, {again} step{'' if again == 1 else 's'} made again"
