"""KV on its way in ``metrics.json``: bytes, and how much of the time was hidden under computation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict

from dejavu.report.counters import SwapTotals, WorkerCounters


class Transfer(TypedDict):
    """Bytes moved, and the time it took: under computation, and with computation standing still for it."""

    bytes: int
    hidden_s: float
    exposed_s: float
    hidden_share: float | None


class Swap(TypedDict):
    """See ``SwapTotals``; all zeros where nothing swaps."""

    bytes_in: int
    bytes_out: int
    unused_bytes: int
    busy_s: float
    own_s: float
    wait_s: float
    steps: int
    waits: int


def transfers(workers: Sequence[WorkerCounters]) -> dict[str, Transfer]:
    """Totals over the workers, by kind."""
    return {
        "streamed": _transfer((one.stream_bytes, one.stream_hidden_s, one.stream_exposed_s) for one in workers),
        "swapped": _transfer(_swapped(one.swap) for one in workers),
        "replicated": _transfer((one.replica_bytes, one.replica_hidden_s, one.replica_exposed_s) for one in workers),
    }


def _swapped(swap: SwapTotals) -> tuple[int, float, float]:
    # What the computing thread copies itself is not hidden under anything.
    exposed_s = swap.wait_s + swap.own_s
    return swap.bytes_in + swap.bytes_out, max(swap.busy_s - exposed_s, 0.0), exposed_s


def swap_totals(workers: Sequence[SwapTotals]) -> Swap:
    """Sums over stages."""
    return Swap(
        bytes_in=sum(one.bytes_in for one in workers),
        bytes_out=sum(one.bytes_out for one in workers),
        unused_bytes=sum(one.unused_bytes for one in workers),
        busy_s=float(sum(one.busy_s for one in workers)),
        own_s=float(sum(one.own_s for one in workers)),
        wait_s=float(sum(one.wait_s for one in workers)),
        steps=sum(one.steps for one in workers),
        waits=sum(one.waits for one in workers),
    )


def _transfer(parts: Iterable[tuple[int, float, float]]) -> Transfer:
    listed = list(parts)
    hidden_s, exposed_s = sum(part[1] for part in listed), sum(part[2] for part in listed)
    return Transfer(
        bytes=sum(part[0] for part in listed),
        hidden_s=float(hidden_s),
        exposed_s=float(exposed_s),
        hidden_share=ratio(hidden_s, hidden_s + exposed_s),
    )


def ratio(part: float, whole: float) -> float | None:
    """None of nothing."""
    return part / whole if whole > 0 else None
