"""What copies cost the computing thread is counted, and nothing that was not copied is taken for copied."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from dejavu.errors import Fatal
from dejavu.ids import RowId
from dejavu.kv import swapper
from dejavu.kv.device import CpuCopier, Mark
from dejavu.kv.slot_cells import SlotCopy
from dejavu.kv.slot_copies import SlotCopies
from dejavu.kv.slots import Slots
from dejavu.kv.swapper import Swapper, SwapSpan

from harness.swap_kit import CELL_BYTES, Background, Held, row, swappers


@pytest.fixture
def swap() -> Iterator[Callable[..., Swapper]]:
    with swappers() as make:
        yield make


def held(swapping: Swapper) -> Held:
    copies = swapping._copies
    assert isinstance(copies, Held)
    return copies


@pytest.mark.parametrize("what", ["store", "settle", "drain", "close"])
def test_every_wait_for_a_copy_is_counted_and_on_the_timeline(
    swap: Callable[..., Swapper], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(swapper, "SlotCopies", Held)
    spans: list[SwapSpan] = []
    ticks, is_armed = itertools.count(), threading.Event()

    def now() -> float:
        if is_armed.is_set():
            # Nobody else looks at the clock: the wait has begun.
            held(swapping).may_end.set()
        return float(next(ticks))

    swapping = swap(copier=Background(), on_span=spans.append, now=now)
    swapping.begin(0, [row(1, 7)], None)
    before = swapping.counters
    swapping.end(0, [row(1, 7)])
    assert held(swapping).has_begun.wait(5.0)
    ways: dict[str, Callable[[], object]] = {
        "store": lambda: swapping.store(0),
        "settle": lambda: swapping.settle(0, frozenset([0])),
        "drain": swapping.drain,
        "close": swapping.close,
    }
    is_armed.set()
    ways[what]()
    after = swapping.counters
    assert (after.waits, after.wait_s > before.wait_s) == (before.waits + 1, True)
    assert [span.microbatch for span in spans if span.name == "swap_wait"] == [
        0,
        0 if what in ("store", "settle") else None,
    ]
    ways[what]()
    assert swapping.counters.waits == after.waits


def test_what_the_computing_thread_copies_itself_is_counted_apart(swap: Callable[..., Swapper]) -> None:
    for copier, is_own in ((CpuCopier(), True), (Background(), False)):
        swapping = swap(copier=copier)
        swapping.begin(0, [row(1, 7)], None)
        assert swapping.counters.own_s == 0
        busy_s = swapping.counters.busy_s
        swapping.end(0, [row(1, 7)])
        swapping.drain()
        counters = swapping.counters
        assert counters.own_s == (counters.busy_s - busy_s if is_own else 0)


def test_whoever_reads_the_host_store_does_not_wait_for_what_comes_in(
    swap: Callable[..., Swapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowIn(Held):
        way, microbatch = "in", 1

    monkeypatch.setattr(swapper, "SlotCopies", SlowIn)
    swapping = swap()
    swapping.begin(0, [row(1, 7)], (1, [row(2, 4)]))
    swapping.end(0, [row(1, 7)])
    assert held(swapping).has_begun.wait(5.0)
    before = swapping.counters.waits
    swapping.drain()
    assert swapping.counters.waits == before
    held(swapping).may_end.set()


def test_what_was_brought_in_and_not_read_when_it_ends_is_counted_as_unused(swap: Callable[..., Swapper]) -> None:
    seen: SimpleQueue[SwapSpan] = SimpleQueue()
    swapping = swap(on_span=seen.put)
    swapping.begin(0, [row(1, 7)], (1, [row(2, 4)]))
    while seen.get(timeout=5.0).microbatch != 1:
        pass
    swapping.end(0, [row(1, 7)])
    assert swapping.counters.unused_bytes == 0
    assert swapping.close() == []
    counters = swapping.counters
    assert (counters.bytes_in, counters.unused_bytes) == (11 * CELL_BYTES, 4 * CELL_BYTES)


def test_a_row_that_ended_while_it_came_in_came_for_nothing() -> None:
    slots = Slots()
    slots.expect(0, [row(1, 4)])
    copy = slots.next_copy()
    assert copy is not None
    slots.forget(0, [0])
    slots.done(copy)
    assert slots.unused_cells == 4


@pytest.mark.parametrize("copier", [CpuCopier(), Background()])
def test_rows_whose_newest_cell_could_not_be_copied_out_are_named_at_the_end(
    swap: Callable[..., Swapper], monkeypatch: pytest.MonkeyPatch, copier: CpuCopier
) -> None:
    class Broken(SlotCopies):
        def make(self, copy: SlotCopy, after: Mark) -> int:
            if copy.way == "out":
                raise RuntimeError("the bus is on fire")
            return super().make(copy, after)

    monkeypatch.setattr(swapper, "SlotCopies", Broken)
    swapping = swap(copier=copier)
    swapping.begin(0, [row(1, 7)], None)
    if copier.gathers_at_once:
        with pytest.raises(Fatal, match="the bus is on fire"):
            swapping.end(0, [row(1, 7)])
    else:
        swapping.end(0, [row(1, 7)])
        with pytest.raises(Fatal, match="the bus is on fire"):
            swapping.store(0)
    assert swapping.close() == [(RowId(1), 7)]
