"""Swaps microbatches between a stage's host store and its two slots, beside the computation (DejaVu §4.2.2)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dejavu.errors import Fatal
from dejavu.kv.device import Copier, Mark
from dejavu.kv.pool import KvPool
from dejavu.kv.slot_copies import SlotCopies
from dejavu.kv.slots import SlotCopy, SlotRow, Slots

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCounters:
    """Since the start."""

    bytes_in: int = 0
    bytes_out: int = 0
    unused_bytes: int = 0
    """Of ``bytes_in``: brought in for nothing, because another microbatch came or the row ended."""
    busy_s: float = 0.0
    """Copying."""
    wait_s: float = 0.0
    """A step was due and its cells were not in."""
    steps: int = 0
    waits: int = 0
    """Steps that waited."""

    def __add__(self, other: SwapCounters) -> SwapCounters:
        """Both together."""
        return SwapCounters(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapSpan:
    """A ``swap_in``, ``swap_out`` or ``swap_wait`` for the timeline, in seconds of ``now``."""

    name: str
    start_s: float
    end_s: float
    microbatch: int
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
        self._counters = SwapCounters()
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
                self._wait_ready(microbatch, rows)
            slot = self._slots.begin_step(microbatch, rows)
            self._counters = replace(self._counters, steps=self._counters.steps + 1)
            if expected is not None:
                self._slots.expect(*expected)
                self._changed.notify_all()
        return slot * self._microbatch_rows

    def end(self, microbatch: int, rows: Sequence[SlotRow]) -> None:
        """Each row has its cell ``length`` in the slot; it is on its way to the host store, or there on a CPU."""
        with self._changed:
            self._slots.end_step(microbatch, rows)
            self._computed = self._copier.mark()
            # So few bytes that waking the other thread, and taking turns with it, would take longer.
            copy = self._slots.next_out() if self._copier.gathers_at_once else None
            if copy is None:
                self._changed.notify_all()
        if copy is not None:
            self._make(copy, self._computed)

    def wrote(self, num_cells: int) -> None:
        """So many cells of a prompt went to the host store from where they were computed."""
        with self._changed:
            self._count(bytes_out=num_cells * self._cell_bytes)

    def settle(self, microbatch: int, row_indices: frozenset[int]) -> None:
        """Nobody copies from or to these places of the host store, and what slots have of them is forgotten."""
        with self._changed:
            self._slots.forget(microbatch, row_indices)
            self._wait(lambda: not self._slots.is_copying(microbatch, row_indices))

    def forget(self, microbatch: int, row_indices: frozenset[int]) -> None:
        """The rows at these places have ended."""
        with self._changed:
            self._slots.forget(microbatch, row_indices)

    def store(self, microbatch: int) -> None:
        """The host store has every cell of the microbatch. Waits; raises Fatal when a copy fails or hangs."""
        with self._changed:
            if not self._slots.is_stored(microbatch):
                self._wait(lambda: self._slots.is_stored(microbatch))

    def drain(self) -> None:
        """The host store has every cell. Raises Fatal when a copy fails or hangs."""
        with self._changed:
            self._wait(lambda: self._slots.is_out)

    def close(self) -> None:
        """The host store has every cell, unless a copy failed, and the thread has ended. Idempotent."""
        try:
            self.drain()
        except Fatal as error:
            # Rows whose cells are missing are not in the table of rows, either: their step was never told.
            logger.warning("closing with cells that are not in the host store: %s", error)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(self._timeout_s)

    @property
    def counters(self) -> SwapCounters:
        """So far."""
        with self._changed:
            return replace(self._counters, unused_bytes=self._slots.unused_cells * self._cell_bytes)

    def _wait_ready(self, microbatch: int, rows: Sequence[SlotRow]) -> None:
        start_s = self._now()
        self._changed.notify_all()
        self._wait(lambda: self._slots.is_ready(microbatch, rows))
        end_s = self._now()
        self._count(wait_s=end_s - start_s, waits=1)
        self._tell(SwapSpan(name="swap_wait", start_s=start_s, end_s=end_s, microbatch=microbatch))

    def _wait(self, condition: Callable[[], bool]) -> None:
        has_come = self._changed.wait_for(lambda: self._error is not None or condition(), self._timeout_s)
        if self._error is not None:
            raise Fatal(f"a swap copy failed: {self._error}") from self._error
        if not has_come:
            raise Fatal(f"no swap copy ended in {self._timeout_s:g} s: {self._slots.describe()}")

    def _run(self) -> None:
        while (copy := self._next()) is not None:
            try:
                self._make(copy, self._computed)
            except Exception as error:  # Whatever it is, the computing thread must learn of it.
                logger.exception("a swap copy failed")
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return

    def _next(self) -> SlotCopy | None:
        with self._changed:
            while not self._is_closed:
                copy = self._slots.next_copy()
                if copy is not None:
                    return copy
                self._changed.wait()
        return None

    def _make(self, copy: SlotCopy, after: Mark) -> None:
        start_s = self._now()
        num_bytes = self._copies.make(copy, after)
        if self._bus is not None and copy.way == "in":
            self._bus.hold_back(num_bytes, self._now() - start_s)
        end_s = self._now()
        with self._changed:
            self._slots.done(copy)
            is_in = copy.way == "in"
            self._count(busy_s=end_s - start_s, **{"bytes_in" if is_in else "bytes_out": num_bytes})
            self._changed.notify_all()
        name = f"swap_{copy.way}"
        self._tell(SwapSpan(name=name, start_s=start_s, end_s=end_s, microbatch=copy.microbatch, num_bytes=num_bytes))

    def _count(self, **more: float) -> None:
        self._counters = replace(
            self._counters, **{name: getattr(self._counters, name) + amount for name, amount in more.items()}
        )

    def _tell(self, span: SwapSpan) -> None:
        if self._on_span is not None:
            self._on_span(span)
