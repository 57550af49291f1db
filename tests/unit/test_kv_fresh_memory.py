"""Memory that is there at once, and whose pages come without touching what is in them."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from dejavu.kv.fresh_memory import fresh_zeros, page_memory, populate

_PAGE_BYTES = 4096
_NUM_BYTES = 48 * 2**20 + 123


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def test_fresh_memory_is_zero_and_of_the_size_asked_for() -> None:
    memory = fresh_zeros(1_000_001)
    assert memory.dtype == torch.uint8
    assert memory.numel() == 1_000_001
    assert not memory.any()


def test_bringing_pages_keeps_what_others_write_meanwhile() -> None:
    memory = page_memory(_NUM_BYTES)
    thread = threading.Thread(target=populate, args=(memory,))
    thread.start()
    written = memory.view(-1)[::_PAGE_BYTES]
    written.fill_(7)
    thread.join()
    assert (written == 7).all()
    assert int(memory.sum(dtype=torch.int64)) == 7 * written.numel()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_pages_are_backed_only_once_they_are_brought() -> None:
    before = _resident_bytes()
    memory = page_memory(_NUM_BYTES)
    assert _resident_bytes() - before < _NUM_BYTES / 4
    if not populate(memory):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE (Linux 5.14)")
    assert _resident_bytes() - before > _NUM_BYTES / 2
