"""Copies between host store and slots: the right cells, counted to the byte, and what becomes of a copy that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import msgspec
import pytest
import torch

from dejavu.errors import Fatal
from dejavu.ids import RowId
from dejavu.kv import slot_copies, swapper
from dejavu.kv.copy_speed import measured_copy_bytes_per_s
from dejavu.kv.device import Mark, copier_for
from dejavu.kv.slot_cells import CellSpan, SlotCopy
from dejavu.kv.slot_copies import SlotCopies
from dejavu.kv.staging import StagingRing
from dejavu.kv.swapper import EmulatedBus, Swapper, SwapSpan

from harness.swap_kit import CELL_BYTES, HELD, LAYOUT, MICROBATCHES, ROWS, Background, filled, row, swappers

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device"),
        ],
    ),
]


def span(row_index: int, start: int, stop: int) -> CellSpan:
    return CellSpan(row_id=RowId(row_index), row_index=row_index, start=start, stop=stop)


SPANS = {
    "equal rows": (span(0, 0, 5), span(1, 0, 5), span(2, 0, 5)),
    "unequal rows": (span(0, 0, 7), span(2, 0, 7), span(1, 2, 12)),
    "new cells": (span(0, 4, 5), span(1, 9, 10), span(2, 0, 1)),
}


@pytest.fixture(params=["direct", "through buffers"])
def crossing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a CUDA device every copy goes through buffers; here they may be so small that each copy takes several."""
    if request.param == "through buffers":
        monkeypatch.setattr(slot_copies, "_crossing", lambda slots, cell_bytes: StagingRing(2, 3 * cell_bytes))
    return str(request.param)


@pytest.mark.parametrize("way", ["in", "out"])
@pytest.mark.parametrize("spans", SPANS.values(), ids=list(SPANS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_moves_its_cells_and_no_other(
    crossing: str, device: str, dtype: str, spans: tuple[CellSpan, ...], way: str
) -> None:
    layout = msgspec.structs.replace(LAYOUT, dtype=dtype)
    host = filled(MICROBATCHES * ROWS, layout=layout)
    slots = filled(2 * ROWS, device, first=1e4, layout=layout)
    before = {"in": slots, "out": host}[way].cells_LCRHSD.cpu().clone()
    source = {"in": host, "out": slots}[way].cells_LCRHSD.cpu().clone()
    copies = SlotCopies(host, slots, ROWS, copier_for(device))
    copy = SlotCopy(number=1, way=way, slot=1, microbatch=2, spans=spans)  # type: ignore[arg-type]
    moved = copies.make(copy, copier_for(device).mark())
    assert moved == sum(one.num_cells for one in spans) * len(HELD) * layout.position_bytes
    first_source, first_target = (2 * ROWS, ROWS) if way == "in" else (ROWS, 2 * ROWS)
    for one in spans:
        before[:, :, first_target + one.row_index, :, one.start : one.stop] = source[
            :, :, first_source + one.row_index, :, one.start : one.stop
        ]
    assert torch.equal({"in": slots, "out": host}[way].cells_LCRHSD.cpu(), before)


@pytest.fixture
def swap() -> Iterator[Callable[..., Swapper]]:
    with swappers() as make:
        yield make


def test_a_steps_bytes_are_its_valid_cells_in_and_its_new_cell_out(swap: Callable[..., Swapper]) -> None:
    spans: list[str] = []
    swapping = swap(on_span=lambda span: spans.append(span.name))
    swapping.begin(0, [row(1, 7)], None)
    swapping.end(0, [row(1, 7)])
    swapping.wrote(4)
    counters = swapping.counters
    assert (counters.bytes_in, counters.bytes_out) == (7 * CELL_BYTES, (1 + 4) * CELL_BYTES)
    assert (counters.steps, counters.waits, counters.wait_s > 0) == (1, 1, True)
    assert sorted(spans) == ["swap_in", "swap_out", "swap_wait"]


def test_what_is_expected_comes_in_while_a_step_is_computed(swap: Callable[..., Swapper]) -> None:
    seen: SimpleQueue[SwapSpan] = SimpleQueue()
    swapping = swap(on_span=seen.put)
    first = swapping.begin(0, [row(1, 7)], (1, [row(2, 4)]))
    while (copied := seen.get(timeout=5.0)).microbatch != 1:
        pass
    assert (copied.name, copied.num_bytes) == ("swap_in", 4 * CELL_BYTES)
    swapping.end(0, [row(1, 7)])
    assert swapping.begin(1, [row(2, 4)], None) == ROWS - first
    assert swapping.counters.waits == 1


def test_a_copy_that_fails_ends_the_stage_with_the_reason(
    swap: Callable[..., Swapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(SlotCopies):
        def make(self, copy: SlotCopy, after: Mark) -> int:
            raise RuntimeError("the bus is on fire")

    monkeypatch.setattr(swapper, "SlotCopies", Broken)
    with pytest.raises(Fatal, match="the bus is on fire"):
        swap().begin(0, [row(1, 7)], None)


def test_a_place_is_given_to_another_row_only_when_the_old_ones_swap_out_has_ended(
    swap: Callable[..., Swapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report B07."""
    happened: list[str] = []
    has_begun, may_end = threading.Event(), threading.Event()

    class Slow(SlotCopies):
        def make(self, copy: SlotCopy, after: Mark) -> int:
            if copy.way == "out":
                has_begun.set()
                assert may_end.wait(5.0)
                happened.append("old row written")
            return super().make(copy, after)

    monkeypatch.setattr(swapper, "SlotCopies", Slow)
    swapping = swap(copier=Background())
    swapping.begin(0, [row(1, 7)], None)
    swapping.end(0, [row(1, 7)])
    assert has_begun.wait(5.0)

    def give_away() -> None:
        swapping.settle(0, frozenset([0]))
        happened.append("given away")

    giving = threading.Thread(target=give_away)
    giving.start()
    # Long enough for a call that does not wait to have come back.
    giving.join(0.2)
    assert giving.is_alive()
    assert happened == []
    may_end.set()
    giving.join(5.0)
    assert happened == ["old row written", "given away"]


def test_rows_of_unequal_lengths_go_out_in_as_few_copies_as_they_have_lengths() -> None:
    pairs = [span(0, 4, 5), span(3, 9, 10), span(1, 4, 5), span(2, 9, 10)]
    assert list(slot_copies._stretches(pairs)) == [(slice(0, 2), slice(4, 5)), (slice(2, 4), slice(9, 10))]


def test_an_emulated_bus_waits_for_what_a_copy_was_faster_and_never_otherwise() -> None:
    slept_s: list[float] = []
    bus = EmulatedBus(100.0, slept_s.append)
    bus.hold_back(50, 0.2)
    bus.hold_back(50, 0.7)
    assert slept_s == [pytest.approx(0.3)]


def test_the_speed_of_a_copy_can_be_measured() -> None:
    assert measured_copy_bytes_per_s(LAYOUT, rows=2, tokens=8, device="cpu") > 0
