"""A swapper over small pools, and copies that go on only when a test lets them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dejavu.ids import RowId
from dejavu.kv.device import CpuCopier, Mark
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.slot_cells import SlotCopy, SlotRow
from dejavu.kv.slot_copies import SlotCopies
from dejavu.kv.swapper import Swapper

LAYOUT = KvLayout(model_hash="m", num_layers=5, num_kv_heads=2, head_dim=3, dtype="float32", max_length=12)
HELD = LayerRange(1, 4)
ROWS, MICROBATCHES = 3, 4
CELL_BYTES = len(HELD) * LAYOUT.position_bytes


def filled(num_rows: int, device: str = "cpu", first: float = 0.0, layout: KvLayout = LAYOUT) -> KvPool:
    memory = KvPool.room(layout, len(HELD), num_rows, device, pin=False)
    pool = KvPool(layout, HELD, num_rows, device, memory=memory)
    values = torch.arange(pool.cells_LCRHSD.numel(), dtype=torch.float32).view(pool.cells_LCRHSD.shape) + first
    pool.cells_LCRHSD.copy_(values)
    return pool


def row(number: int, length: int) -> SlotRow:
    return SlotRow(row_id=RowId(number), row_index=0, length=length)


class Background(CpuCopier):
    """As on a CUDA device, new cells go out beside the computation."""

    gathers_at_once = False


class Held(SlotCopies):
    """Copies of microbatch ``microbatch`` that way go on only when they may. In the place of ``swapper.SlotCopies``."""

    way, microbatch = "out", 0

    def __init__(self, host: KvPool, slots: KvPool, microbatch_rows: int, copier: CpuCopier) -> None:
        super().__init__(host, slots, microbatch_rows, copier)
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def make(self, copy: SlotCopy, after: Mark) -> int:
        if (copy.way, copy.microbatch) == (self.way, self.microbatch):
            self.has_begun.set()
            assert self.may_end.wait(5.0)
        return super().make(copy, after)


@contextmanager
def swappers() -> Iterator[Callable[..., Swapper]]:
    """Makes swappers, and closes them in the end."""
    made: list[Swapper] = []

    def make(**others: object) -> Swapper:
        ticks = itertools.count()
        values = {"copier": CpuCopier(), "now": lambda: float(next(ticks)), "timeout_s": 5.0, **others}
        made.append(Swapper(filled(MICROBATCHES * ROWS), filled(2 * ROWS), ROWS, **values))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()
