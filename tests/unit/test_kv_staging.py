"""The staging ring is bounded and gives every buffer back."""

from __future__ import annotations

import threading

import pytest

from dejavu.kv.staging import StagingRing, StagingTimeout


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
