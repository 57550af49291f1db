"""Faults that come at random: whom, when and which is drawn, and nothing is struck that the promise does not cover."""

from __future__ import annotations

import logging
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from dejavu.ids import WorkerName
from dejavu.workflows.cluster import RunningCluster

logger = logging.getLogger(__name__)

Kind = Literal["kill", "freeze", "pause", "partition", "blink", "slow"]
"""``freeze`` and ``partition`` last longer than a lease, ``pause`` and ``blink`` less."""
LETHAL: tuple[Kind, ...] = ("kill", "freeze", "partition")
KINDS: tuple[Kind, ...] = ("kill", "kill", "freeze", "pause", "partition", "blink", "slow")
_WINDOW_S = 60.0
_MOST_OF_A_NAME = 3
"""A worker's process is started again at most four times a minute."""
_MOST_LETHAL = 15
"""A cluster that needs more than 20 repairs a minute ends by its own decision."""
_TWO_AT_ONCE = 0.15
_SOON_AGAIN = 0.2
_SOON_S = 0.5
_LOOK_S = 0.02


@dataclass(slots=True, kw_only=True)
class Storm:
    """Strikes workers of the cluster until so many faults or so many seconds; then everybody is well again."""

    cluster: RunningCluster
    chooser: random.Random
    most_faults: int
    for_s: float
    ttl_s: float
    counts: Counter[str] = field(default_factory=Counter)
    num_at_once: int = 0
    """Times that two workers were struck at the same moment."""
    _struck_s: list[tuple[float, WorkerName]] = field(default_factory=list)
    _later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """The storm begins."""
        self._thread = threading.Thread(target=self._rage, name="storm", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Nothing more is struck; who was stopped goes on."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _rage(self) -> None:
        end_s = time.monotonic() + self.for_s
        next_s = time.monotonic() + self._pause_s()
        while not self._is_over.wait(_LOOK_S):
            now_s = time.monotonic()
            self._do_due(now_s)
            if now_s >= end_s or self.counts.total() >= self.most_faults:
                break
            if now_s >= next_s:
                self._strike(now_s)
                is_soon = self.chooser.random() < _SOON_AGAIN
                next_s = now_s + (self.chooser.uniform(0.0, _SOON_S) if is_soon else self._pause_s())
        while self._later and not self._is_over.wait(_LOOK_S):
            self._do_due(time.monotonic())
        self._do_due(float("inf"))

    def _pause_s(self) -> float:
        return self.chooser.expovariate(self.most_faults / self.for_s)

    def _strike(self, now_s: float) -> None:
        plan, running = self.cluster.links.plan, self.cluster.launcher.running()
        names = [name for name in (*plan.workers, *plan.standby) if name in running]
        both = self.chooser.random() < _TWO_AT_ONCE
        for name in self.chooser.sample(names, min(1 + both, len(names))):
            self._hit(name, self.chooser.choice(KINDS), now_s)
        self.num_at_once += both

    def _hit(self, name: WorkerName, kind: Kind, now_s: float) -> None:
        recent = [one for one in self._struck_s if now_s - one[0] < _WINDOW_S]
        num_of_name = sum(one[1] == name for one in recent)
        if kind in LETHAL and (num_of_name >= _MOST_OF_A_NAME or len(recent) >= _MOST_LETHAL):
            kind = "pause"
        if kind in LETHAL:
            self._struck_s.append((now_s, name))
        self.counts[kind] += 1
        logger.warning("storm: %s %s", kind, name)
        launcher, ttl_s, chooser = self.cluster.launcher, self.ttl_s, self.chooser
        match kind:
            case "kill":
                launcher.signal(name, signal.SIGKILL)
            case "freeze" | "pause":
                for_s = ttl_s * (chooser.uniform(1.2, 2.0) if kind == "freeze" else chooser.uniform(0.1, 0.5))
                pid = launcher.pid_of(name)
                launcher.signal(name, signal.SIGSTOP)
                self._later.append((now_s + for_s, lambda: self._wake(name, pid)))
            case "partition" | "blink":
                for_s = ttl_s * (chooser.uniform(1.2, 2.0) if kind == "partition" else chooser.uniform(0.1, 0.4))
                launcher.tell(name, msgspec.json.encode({"partition_s": for_s}))
            case "slow":
                launcher.tell(name, msgspec.json.encode({"slow_s": chooser.uniform(0.001, 0.02)}))
                fast = msgspec.json.encode({"slow_s": 0.0})
                self._later.append((now_s + chooser.uniform(0.5, 3.0), lambda: launcher.tell(name, fast)))

    def _wake(self, name: WorkerName, pid: int | None) -> None:
        """The process that was stopped goes on, if it is still there; its successor was not stopped."""
        if self.cluster.launcher.pid_of(name) == pid:
            self.cluster.launcher.signal(name, signal.SIGCONT)

    def _do_due(self, now_s: float) -> None:
        due = [one for one in self._later if one[0] <= now_s]
        self._later = [one for one in self._later if one[0] > now_s]
        for _, act in due:
            act()
