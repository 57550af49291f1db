"""Where a stage's steps read and write KV: in the rows' places, or in the slots of a stage that swaps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from dejavu.control.ring import StepRow
from dejavu.engine.messages import PromptRow
from dejavu.engine.pool_rows import PoolRows
from dejavu.kv.pool import KvPool
from dejavu.kv.slot_cells import SlotRow
from dejavu.kv.swap_counters import SwapCounters
from dejavu.kv.swapper import Swapper

logger = logging.getLogger(__name__)

_WINDOW_STEPS = 64


class StepMemory(Protocol):
    """Main thread only."""

    @property
    def pool(self) -> KvPool:
        """What steps read and write."""

    def begin(self, microbatch: int, rows: Sequence[StepRow]) -> int:
        """The rows' cells lie in ``pool``, whose row the microbatch begins at is returned. May wait for them."""

    def end(self, microbatch: int, rows: Sequence[StepRow]) -> None:
        """The rows have one more cell, which is where copies and other workers are given it from, or will be."""

    def prompts(self, rows: Sequence[PromptRow]) -> None:
        """The rows' prompts were computed here, and their cells lie in the rows' places."""

    def settle(self, places: frozenset[int]) -> None:
        """These places may be written to: what lay there is forgotten."""

    def forget(self, places: Iterable[int]) -> None:
        """The rows at these places have ended."""

    def drain(self) -> None:
        """Every cell lies in its row's place."""

    def close(self) -> None:
        """As ``drain``, and nothing goes on in the background. Idempotent."""

    @property
    def counters(self) -> SwapCounters:
        """What was swapped in this epoch."""


class Resident:
    """Steps compute where the rows lie."""

    def __init__(self, pool: KvPool, microbatch_rows: int) -> None:
        self.pool = pool
        self.counters = SwapCounters()
        self._microbatch_rows = microbatch_rows

    def begin(self, microbatch: int, rows: Sequence[StepRow]) -> int:
        """At once."""
        return microbatch * self._microbatch_rows

    def end(self, microbatch: int, rows: Sequence[StepRow]) -> None:
        """They are there."""

    def prompts(self, rows: Sequence[PromptRow]) -> None:
        """They are there."""

    def settle(self, places: frozenset[int]) -> None:
        """Nobody else uses them."""

    def forget(self, places: Iterable[int]) -> None:
        """Nothing is kept of them."""

    def drain(self) -> None:
        """They always do."""

    def close(self) -> None:
        """Nothing goes on."""


class Swapped:
    """Steps compute in slots; the rows' places are in host memory.

    Args:
        rows: what lies in the host store.
        pool: the slots.
        are_copied: whether somebody takes a step's new cells out of the host store as soon as the step is over.
    """

    def __init__(
        self,
        swapper: Swapper,
        rows: PoolRows,
        pool: KvPool,
        *,
        num_microbatches: int,
        microbatch_rows: int,
        are_copied: bool,
        now: Callable[[], float],
    ) -> None:
        self.pool = pool
        self._swapper = swapper
        self._rows = rows
        self._num_microbatches = num_microbatches
        self._microbatch_rows = microbatch_rows
        self._are_copied = are_copied
        self._followers: dict[int, int] = {}
        """By microbatch, the one that was computed after it last time."""
        self._latest: int | None = None
        self._watch = _Watch(now, lambda: swapper.counters)

    def begin(self, microbatch: int, rows: Sequence[StepRow]) -> int:
        """The rows' cells are in the microbatch's slot; the likely next microbatch comes into the other one."""
        if self._latest is not None and self._latest != microbatch:
            self._followers[self._latest] = microbatch
        self._latest = microbatch
        first_row = self._swapper.begin(microbatch, _slot_rows(rows), self._expected(microbatch))
        self._watch.begin()
        return first_row

    def end(self, microbatch: int, rows: Sequence[StepRow]) -> None:
        """The new cells are on their way to the host store, or there where somebody copies them from it."""
        self._watch.end()
        self._swapper.end(microbatch, _slot_rows(rows))
        if self._are_copied:
            self._swapper.store(microbatch)

    def prompts(self, rows: Sequence[PromptRow]) -> None:
        """They were written to the host store: that is how their new cells went out."""
        self._swapper.wrote(sum(row.length for row in rows))

    def settle(self, places: frozenset[int]) -> None:
        """No copy reads or writes these places."""
        for microbatch, indices in self._by_microbatch(places).items():
            self._swapper.settle(microbatch, indices)

    def forget(self, places: Iterable[int]) -> None:
        """They need not come in any more."""
        for microbatch, indices in self._by_microbatch(places).items():
            self._swapper.forget(microbatch, indices)

    def drain(self) -> None:
        """The host store has every cell."""
        self._swapper.drain()

    def close(self) -> None:
        """The slots are of no use any more; cells that a failed copy has left there are in the table no longer."""
        for row_id, length in self._swapper.close():
            self._rows.written(row_id, length)

    @property
    def counters(self) -> SwapCounters:
        """In this epoch."""
        return self._swapper.counters

    def _expected(self, microbatch: int) -> tuple[int, Sequence[SlotRow]] | None:
        """What followed last time, or the nearest in the order of the ring, that has rows."""
        cyclic = [(microbatch + away) % self._num_microbatches for away in range(1, self._num_microbatches)]
        likely = self._followers.get(microbatch)
        for following in cyclic if likely is None else [likely, *cyclic]:
            rows = [
                SlotRow(row_id=row_id, row_index=row_index, length=length)
                for row_id, row_index, length in self._rows.of_microbatch(following)
            ]
            if rows:
                return following, rows
        return None

    def _by_microbatch(self, places: Iterable[int]) -> dict[int, frozenset[int]]:
        found: dict[int, set[int]] = {}
        for place in places:
            microbatch, row_index = divmod(place, self._microbatch_rows)
            found.setdefault(microbatch, set()).add(row_index)
        return {microbatch: frozenset(indices) for microbatch, indices in found.items()}


class _Watch:
    """Says once when the copies of many steps took longer than their computation."""

    def __init__(self, now: Callable[[], float], counters: Callable[[], SwapCounters]) -> None:
        self._now = now
        self._counters = counters
        self._began_s = 0.0
        self._computed_s = 0.0
        self._num_steps = 0
        self._before = SwapCounters()
        self._has_told = False

    def begin(self) -> None:
        """A step is computed from now on."""
        self._began_s = self._now()

    def end(self) -> None:
        """The step is over."""
        self._computed_s += self._now() - self._began_s
        self._num_steps += 1
        if self._num_steps < _WINDOW_STEPS:
            return
        counters = self._counters()
        waited_s = counters.wait_s - self._before.wait_s
        if waited_s > self._computed_s and not self._has_told:
            self._has_told = True
            logger.warning(
                "swapping takes longer than computing: %s steps waited for their KV %s times, %.3g s in all, and "
                "computed %.3g s; give fewer rows a microbatch (strategy.microbatch.token) or take "
                "strategy.swapping=off",
                self._num_steps,
                counters.waits - self._before.waits,
                waited_s,
                self._computed_s,
            )
        self._before, self._computed_s, self._num_steps = counters, 0.0, 0


def _slot_rows(rows: Sequence[StepRow]) -> list[SlotRow]:
    return [SlotRow(row_id=row.row_id, row_index=row.row_index, length=row.position) for row in rows]
