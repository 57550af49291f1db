"""Swap copies that take their time, between slots in which every cell that is not in is poisoned."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import ClassVar

import torch

from dejavu.kv.device import Copier, Mark
from dejavu.kv.pool import KvPool
from dejavu.kv.slot_cells import SlotCopy
from dejavu.kv.slot_copies import SlotCopies
from dejavu.kv.slots import NUM_SLOTS

POISON = 1e4
"""Large enough to change any token, and finite, because cells behind a row's last are multiplied with 0."""
_HALF_POISON = 100.0
"""In float16 the products with it must be finite, too."""
_LONGEST_DELAY_S = 0.004


class PoisonedCopies(SlotCopies):
    """In the place of ``dejavu.kv.swapper.SlotCopies``."""

    on_copy: ClassVar[Callable[[KvPool, SlotCopy], None]] = staticmethod(lambda host, copy: None)
    """Is told, on the copying thread, of each copy of any stage that is half done."""

    def __init__(self, host: KvPool, slots: KvPool, microbatch_rows: int, copier: Copier) -> None:
        super().__init__(host, slots, microbatch_rows, copier)
        self._memory, self._store = slots, host
        self._rows = microbatch_rows
        self._owners: list[int | None] = [None] * NUM_SLOTS
        self._chooser = random.Random(7)
        self._poison = _HALF_POISON if slots.cells_LCRHSD.dtype == torch.float16 else POISON
        with torch.inference_mode():
            slots.cells_LCRHSD.fill_(self._poison)

    def make(self, copy: SlotCopy, after: Mark) -> int:
        """As it should, after a while; what the slot's last owner had there is gone."""
        if self._owners[copy.slot] != copy.microbatch:
            self._owners[copy.slot] = copy.microbatch
            first = copy.slot * self._rows
            with torch.inference_mode():
                self._memory.cells_LCRHSD[:, :, first : first + self._rows].fill_(self._poison)
        time.sleep(self._chooser.uniform(0.0, _LONGEST_DELAY_S))
        type(self).on_copy(self._store, copy)
        return super().make(copy, after)
