"""Repairs made up for tests."""

from __future__ import annotations

from typing import Any

from dejavu.control.journal import Failure, RepairJournal, RestoreReceipt
from dejavu.control.receipts import receipts
from dejavu.ids import Epoch, IncarnationId, WorkerName
from dejavu.report.repairs import RepairReceipt

START_S = 1_790_000_000.0
TICK_S = 1 / 64
"""A part of a second that sums hold exactly."""
W2, W3 = WorkerName("w2"), WorkerName("w3")


def journal(**changes: Any) -> RepairJournal:
    """w2 was killed at ``START_S`` and replaced by the standby w3; a third of a second, part by part."""
    values: dict[str, Any] = {
        "number": 1,
        "epoch": Epoch(2),
        "failures": (failure(),),
        "how": {W2: "standby"},
        "replaced_by": {W2: W3},
        "phase": "done",
        "fenced_s": START_S + 3 * TICK_S,
        "replaced_s": START_S + 11 * TICK_S,
        "receipt": restored(),
    }
    return RepairJournal(**{**values, **changes})


def failure(**changes: Any) -> Failure:
    """The end of w2's process, seen a tick later."""
    values: dict[str, Any] = {
        "worker": W2,
        "incarnation": IncarnationId("i2"),
        "cause": "exit",
        "reason": "died (killed by signal 9)",
        "seen_s": START_S + TICK_S,
        "since_s": START_S,
    }
    return Failure(**{**values, **changes})


def restored(**changes: Any) -> RestoreReceipt:
    """Four rows went on from copies."""
    values: dict[str, Any] = {
        "restored_s": START_S + 13 * TICK_S,
        "resumed_s": START_S + 21 * TICK_S,
        "rows": {"replica": 4, "recompute": 0},
        "resume_steps": {0: 20, 1: 20},
        "steps_recomputed": {0: 1, 1: 0},
        "bytes_restored": 1_200_000,
        "bytes_replicated": 400_000,
    }
    return RestoreReceipt(**{**values, **changes})


def repair_receipt(**changes: Any) -> RepairReceipt:
    """The receipt of that repair, with other values where ``changes`` says so."""
    (made,) = receipts([journal()])
    return {**made, **changes}  # type: ignore[typeddict-item]
