"""The workers' meters, read about once a second while they serve, and totals that survive the workers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from dejavu.engine import messages as m
from dejavu.ids import Epoch
from dejavu.report.counters import LiveFigures, WorkerCounters
from dejavu.serving.cluster_links import ClusterLinks

INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a worker said last, and what it did between its last two answers. Rates are None before a second one."""

    epoch: Epoch
    figures: LiveFigures
    busy_share: float | None = None
    sent_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """To each peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTotals:
    """What all processes of one name have counted. It never decreases; what a process counted after its last answer
    before it died is not in it."""

    amounts: Mapping[str, float]
    """By name, see ``amounts_of``."""
    sent_bytes: Mapping[str, float]
    """To each peer."""


def amounts_of(counters: WorkerCounters) -> dict[str, float]:
    """The counters that only grow, by name."""
    return {
        "compute_seconds": counters.compute_s,
        "steps": counters.steps,
        "prompts": counters.prompts,
        "streamed_bytes": counters.stream_bytes,
        "replicated_bytes": counters.replica_bytes,
        "swapped_in_bytes": counters.swap.bytes_in,
        "swapped_out_bytes": counters.swap.bytes_out,
        "corrupt_chunks": counters.kv.get("corrupt", 0),
    }


class LiveMeters:
    """The controller's ``Meters``: asks every worker, one question at a time each. Readings may be taken on any thread.

    A worker that does not answer is not asked again in its epoch: whether it is dead is for others to find out.
    """

    def __init__(self, *, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._asked_s: float | None = None
        self._epoch: Epoch | None = None
        self._owed: set[str] = set()
        self._lock = threading.Lock()
        self._readings: dict[str, Reading] = {}
        self._amounts: dict[str, Counter[str]] = {}
        self._sent: dict[str, Counter[str]] = {}

    def beat(self, links: ClusterLinks, now_s: float) -> None:
        """See ``Meters``."""
        plan = links.plan
        if plan.epoch != self._epoch:
            self._epoch, self._owed = plan.epoch, set()
        elif self._asked_s is not None and now_s - self._asked_s < self._interval_s:
            return
        self._asked_s = now_s
        for worker in plan.workers:
            if worker not in self._owed:
                self._owed.add(worker)
                links.worker(worker, m.AskMeters(epoch=plan.epoch))

    def heard(self, message: m.AnyMessage, worker: str) -> bool:
        """See ``Meters``."""
        if not isinstance(message, m.Meters):
            return False
        self._owed.discard(worker)
        with self._lock:
            before = self._readings.get(worker)
            self._readings[worker] = _reading(before, message.epoch, message.figures)
            self._add(worker, before, message)
        return True

    def readings(self) -> dict[str, Reading]:
        """The last reading of every worker that has ever answered, by name. Any thread."""
        with self._lock:
            return dict(self._readings)

    def totals(self) -> dict[str, WorkerTotals]:
        """By worker. Any thread."""
        with self._lock:
            return {
                worker: WorkerTotals(amounts=dict(amounts), sent_bytes=dict(self._sent[worker]))
                for worker, amounts in self._amounts.items()
            }

    def _add(self, worker: str, before: Reading | None, message: m.Meters) -> None:
        figures = message.figures
        is_same_process = before is not None and before.figures.incarnation == figures.incarnation
        old_amounts = amounts_of(before.figures.counters) if before is not None and is_same_process else {}
        is_same_epoch = is_same_process and before is not None and before.epoch == message.epoch
        old_sent = before.figures.sent_bytes if before is not None and is_same_epoch else {}
        _add_growth(self._amounts.setdefault(worker, Counter()), old_amounts, amounts_of(figures.counters))
        _add_growth(self._sent.setdefault(worker, Counter()), old_sent, figures.sent_bytes)


def _add_growth(totals: Counter[str], before: Mapping[str, float], after: Mapping[str, float]) -> None:
    for name, value in after.items():
        # Counter's annotation knows whole numbers alone; seconds are counted too.
        totals[name] += max(value - before.get(name, 0), 0)  # type: ignore[assignment]


def _reading(before: Reading | None, epoch: Epoch, figures: LiveFigures) -> Reading:
    is_next = (
        before is not None and before.figures.incarnation == figures.incarnation and figures.at_s > before.figures.at_s
    )
    if before is None or not is_next:
        return Reading(epoch=epoch, figures=figures)
    old, elapsed_s = before.figures, figures.at_s - before.figures.at_s
    is_same_epoch = before.epoch == epoch
    sent_before = old.sent_bytes if is_same_epoch else {}
    return Reading(
        epoch=epoch,
        figures=figures,
        # A pass is counted when it ends: a long one may have begun before the last answer.
        busy_share=min((figures.counters.compute_s - old.counters.compute_s) / elapsed_s, 1.0),
        sent_bytes_per_s={
            peer: (num_bytes - sent_before.get(peer, 0)) / elapsed_s for peer, num_bytes in figures.sent_bytes.items()
        },
    )
