"""Swaps microbatches between a stage's host store and its two slots, beside the computation (DejaVu §4.2.2)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dejavu.errors import Fatal
from dejavu.ids import RowId
from dejavu.kv.device import Copier, Mark
from dejavu.kv.pool import KvPool
from dejavu.kv.slot_cells import SlotCopy, SlotRow
from dejavu.kv.slot_copies import SlotCopies
from dejavu.kv.slots import Slots
from dejavu.kv.swap_counters import SwapCounters, SwapTally

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapSpan:
    """A ``swap_in``, ``swap_out`` or ``swap_wait`` for the timeline, in seconds of ``now``."""

    name: str
    start_s: float
    end_s: float
    microbatch: int | None
    """None for a wait for all of them."""
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EmulatedBus:
    """Makes what comes into slots take as long as over a bus of this speed, for measurements without one."""

    bytes_per_s: float
    sleep: Callable[[float], None]

    def hold_back(self, num_bytes: int, taken_s: float) -> None:
        """The calling thread has waited for what the bus would have taken longer."""
        left_s = num_bytes / self.bytes_per_s - taken_s
        if left_s > 0:
            self.sleep(left_s)


class Swapper:
    """Main thread and one thread of its own. What the steps of a microbatch need is in its slot before they begin.

    Args:
        host: the host store, microbatch after microbatch.
        slots: memory of two microbatches on the computing device.
        now: seconds that never go back, for the timeline.
        on_span: is told of each copy and each wait, on any thread.
        bus: over which cells seem to come in; None: as fast as they do.
        timeout_s: no copy takes longer; a step that waits longer raises Fatal.
    """

    def __init__(
        self,
        host: KvPool,
        slots: KvPool,
        microbatch_rows: int,
        *,
        copier: Copier,
        now: Callable[[], float],
        on_span: Callable[[SwapSpan], None] | None = None,
        bus: EmulatedBus | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._microbatch_rows = microbatch_rows
        self._copier = copier
        self._on_span = on_span
        self._bus = bus
        self._now = now
        self._timeout_s = timeout_s
        self._cell_bytes = host.cell_bytes(host.layers, host.heads)
        self._copies = SlotCopies(host, slots, microbatch_rows, copier)
        self._slots = Slots()
        self._tally = SwapTally()
        self._computed: Mark = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kv-swapper", daemon=True)
        self._thread.start()

    def begin(self, microbatch: int, rows: Sequence[SlotRow], expected: tuple[int, Sequence[SlotRow]] | None) -> int:
        """Every cell of the rows is in a slot, which is the microbatch's until ``end``. Waits for copies.

        ``expected``: what comes next, if anything; it will come in meanwhile. Returns the slot's first row.
        Raises Fatal when a copy fails or hangs.
        """
        with self._changed:
            self._slots.need(microbatch, rows)
            if not self._slots.is_ready(microbatch, rows):
                self._changed.notify_all()
                self._wait(lambda: self._slots.is_ready(microbatch, rows), microbatch)
            slot = self._slots.begin_step(microbatch, rows)
            self._tally.steps += 1
            if expected is not None:
                self._slots.expect(*expected)
                # Woken for nothing, the other thread would take turns with this one.
                if self._slots.is_short:
                    self._changed.notify_all()
        return slot * self._microbatch_rows

    def end(self, microbatch: int, rows: Sequence[SlotRow]) -> None:
        """Each row has its cell ``length`` in the slot; it is on its way to the host store, or there on a CPU.

        Raises Fatal when a copy that it makes itself fails.
        """
        with self._changed:
            self._slots.end_step(microbatch, rows)
            self._computed = self._copier.mark()
            # So few bytes that waking the other thread, and taking turns with it, would take longer.
            copy = self._slots.next_out() if self._copier.gathers_at_once else None
            if copy is None:
                self._changed.notify_all()
        if copy is not None:
            self._make(copy, self._computed, is_own=True)

    def wrote(self, num_cells: int) -> None:
        """So many cells of a prompt went to the host store from where they were computed."""
        with self._changed:
            self._tally.bytes_out += num_cells * self._cell_bytes

    def settle(self, microbatch: int, row_indices: frozenset[int]) -> None:
        """Nobody copies from or to these places of the host store, and what slots have of them is forgotten.

        Waits for copies; raises Fatal when one fails or hangs.
        """
        with self._changed:
            self._slots.forget(microbatch, row_indices)
            self._wait(lambda: not self._slots.is_copying(microbatch, row_indices), microbatch)

    def forget(self, microbatch: int, row_indices: frozenset[int]) -> None:
        """The rows at these places have ended."""
        with self._changed:
            self._slots.forget(microbatch, row_indices)

    def store(self, microbatch: int) -> None:
        """The host store has every cell of the microbatch. Waits; raises Fatal when a copy fails or hangs."""
        with self._changed:
            self._wait(lambda: self._slots.is_stored(microbatch), microbatch)

    def drain(self) -> None:
        """The host store has every cell. Waits; raises Fatal when a copy fails or hangs."""
        with self._changed:
            self._wait(lambda: self._slots.is_all_stored)

    def close(self) -> Sequence[tuple[RowId, int]]:
        """The host store has every cell, unless a copy failed or hangs, and the thread has ended. Idempotent.

        Returns the rows of which the host store lacks the newest cells, each with how many it has from the first.
        """
        with self._changed:
            # What was to come next comes for nobody any more.
            self._slots.rest()
            try:
                self._wait(lambda: self._slots.is_out)
                self._slots.clear()
            except Fatal as error:
                logger.warning("closing with cells that are not in the host store: %s", error)
            lacking = self._slots.stored_in_part
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(self._timeout_s)
        return lacking

    @property
    def counters(self) -> SwapCounters:
        """So far."""
        with self._changed:
            return self._tally.counters(unused_bytes=self._slots.unused_cells * self._cell_bytes)

    def _wait(self, condition: Callable[[], bool], microbatch: int | None = None) -> None:
        """The condition holds; the time until then is counted and on the timeline."""
        if condition():
            return
        start_s = self._now()
        has_come = self._changed.wait_for(lambda: self._error is not None or condition(), self._timeout_s)
        end_s = self._now()
        self._tally.wait_s += end_s - start_s
        self._tally.waits += 1
        self._tell(SwapSpan(name="swap_wait", start_s=start_s, end_s=end_s, microbatch=microbatch))
        if self._error is not None:
            raise Fatal(f"a swap copy failed: {self._error}") from self._error
        if not has_come:
            raise Fatal(f"no swap copy ended in {self._timeout_s:g} s: {self._slots.describe()}")

    def _run(self) -> None:
        while (copy := self._next()) is not None:
            try:
                self._make(copy, self._computed)
            except Fatal:
                # The computing thread learns of it where it waits.
                logger.exception("the swapping thread ends")
                return

    def _next(self) -> SlotCopy | None:
        with self._changed:
            while not self._is_closed:
                copy = self._slots.next_copy()
                if copy is not None:
                    return copy
                self._changed.wait()
        return None

    def _make(self, copy: SlotCopy, after: Mark, *, is_own: bool = False) -> None:
        """The copy is made, counted and told; ``is_own``: by the computing thread.

        Raises Fatal when it fails, and so will whoever waits for it.
        """
        start_s = self._now()
        try:
            num_bytes = self._copies.make(copy, after)
            if self._bus is not None and copy.way == "in":
                self._bus.hold_back(num_bytes, self._now() - start_s)
        except Exception as error:  # Whatever it is, nobody may rely on these cells.
            with self._changed:
                self._error = error
                self._changed.notify_all()
            raise Fatal(f"a swap copy failed: {error}") from error
        end_s = self._now()
        with self._changed:
            self._slots.done(copy)
            self._tally.copied(copy.way, num_bytes, end_s - start_s, is_own=is_own)
            # The computing thread may wait for it; the other one only has to know where its slot was waited for.
            if not is_own or self._slots.is_short:
                self._changed.notify_all()
        name = f"swap_{copy.way}"
        self._tell(SwapSpan(name=name, start_s=start_s, end_s=end_s, microbatch=copy.microbatch, num_bytes=num_bytes))

    def _tell(self, span: SwapSpan) -> None:
        if self._on_span is not None:
            self._on_span(span)
