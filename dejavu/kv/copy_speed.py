"""How fast a stage's KV comes into a slot, for the rule that says whether swapping pays."""

from __future__ import annotations

import time
from statistics import median

import torch

from dejavu.ids import RowId
from dejavu.kv.device import copier_for
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.slot_cells import CellSpan, SlotCopy
from dejavu.kv.slot_copies import SlotCopies
from dejavu.kv.slots import NUM_SLOTS

_REPEATS = 5


def measured_copy_bytes_per_s(layout: KvLayout, *, rows: int, tokens: int, device: str) -> float:
    """Bytes a second of ``rows`` rows of ``tokens`` positions, all layers, on one thread; the median of a few copies.

    The rows are more than a cache holds, or the number is that of the cache.
    """
    layers, threads = LayerRange(0, layout.num_layers), torch.get_num_threads()
    is_pinned = torch.device(device).type != "cpu"
    memory = KvPool.room(layout, layout.num_layers, rows, pin=is_pinned)
    host = KvPool(layout, layers, rows, memory=memory)
    slots = KvPool(layout, layers, NUM_SLOTS * rows, device)
    copies = SlotCopies(host, slots, rows, copier_for(device))
    spans = tuple(CellSpan(row_id=RowId(row), row_index=row, start=0, stop=tokens) for row in range(rows))
    copy = SlotCopy(number=0, way="in", slot=0, microbatch=0, spans=spans)
    torch.set_num_threads(1)
    try:
        copies.make(copy, None)
        taken_s = []
        for _ in range(_REPEATS):
            start_s = time.perf_counter()
            num_bytes = copies.make(copy, None)
            taken_s.append(time.perf_counter() - start_s)
    finally:
        torch.set_num_threads(threads)
    return num_bytes / median(taken_s)
