"""The staging ring is bounded and gives every buffer back."""

from __future__ import annotations

import mmap
import threading

import pytest
import torch

from dejavu.kv.staging import LentMemory, StagingRing, StagingTimeout


def test_a_ring_hands_out_its_buffers_and_then_times_out() -> None:
    ring = StagingRing(2, 16)
    first, second = ring.acquire(1), ring.acquire(1)
    assert first is not second
    assert ring.num_out == 2
    with pytest.raises(StagingTimeout, match="all 2 staging buffers of 16 bytes"):
        ring.acquire(0)
    first.release()
    assert ring.acquire(0) is first


def test_a_second_release_does_not_free_the_buffer_of_the_next_user_twice() -> None:
    ring = StagingRing(1, 16)
    buffer = ring.acquire(0)
    buffer.release()
    buffer.release()
    assert ring.num_out == 0
    ring.acquire(0)
    with pytest.raises(StagingTimeout):
        ring.acquire(0)


def test_a_waiting_acquire_gets_the_buffer_that_is_released() -> None:
    ring = StagingRing(1, 16)
    buffer = ring.acquire(0)
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(ring.acquire(10)))
    waiter.start()
    assert got == []
    buffer.release()
    waiter.join(10)
    assert got == [buffer]


def test_a_foreign_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="another staging ring"):
        StagingRing(1, 16).give_back(StagingRing(1, 16).acquire(0))


def test_a_payload_is_the_buffers_memory_and_not_a_copy() -> None:
    buffer = StagingRing(1, 16).acquire(0)
    payload = buffer.payload(4)
    buffer.work[:4] = 9
    buffer.copy_to_host(4)
    assert bytes(payload) == b"\x09\x09\x09\x09"


def test_an_empty_ring_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        StagingRing(0, 16)


def test_every_buffer_starts_on_a_page_of_its_own() -> None:
    ring = StagingRing(3, 5000)
    buffers = [ring.acquire(0) for _ in range(3)]
    assert [buffer.host.data_ptr() % mmap.PAGESIZE for buffer in buffers] == [0, 0, 0]
    assert [buffer.host.numel() for buffer in buffers] == [5000, 5000, 5000]
    for value, buffer in enumerate(buffers):
        buffer.work.fill_(value + 1)
    assert [int(buffer.host.min()) for buffer in buffers] == [1, 2, 3]


def test_a_waiting_acquire_does_not_need_half_the_ring_to_come_back() -> None:
    ring = StagingRing(8, 16)
    buffers = [ring.acquire(0) for _ in range(8)]
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(ring.acquire(10)))
    waiter.start()
    buffers[3].release()
    waiter.join(10)
    assert got == [buffers[3]]


def test_lent_memory_is_filled_where_it_lies_and_only_once() -> None:
    memory = torch.zeros(8, dtype=torch.uint8)
    lent = LentMemory(memory)
    buffer = lent.acquire(0)
    buffer.work[:2] = 7
    buffer.release()
    assert memory.tolist() == [7, 7, 0, 0, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="8 bytes of lent memory are full"):
        lent.acquire(0)


@pytest.mark.parametrize("memory", [torch.zeros(4), torch.zeros(4, 4, dtype=torch.uint8).t()])
def test_memory_that_is_no_contiguous_bytes_is_not_lent(memory: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous uint8"):
        LentMemory(memory)
