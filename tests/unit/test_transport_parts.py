"""The parts of the link protocol, one by one and without a network."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import MappingProxyType

import numpy as np
import pytest

from dejavu.errors import ConfigError
from dejavu.transport import ucx
from dejavu.transport.buffer_pool import BufferPool, size_class
from dejavu.transport.credits import CreditLimit, ReceiverCredits, SenderCredits
from dejavu.transport.factory import make_transport
from dejavu.transport.frames import FRAME_BYTES, FRAME_TAG, Credit, FrameError, Head, Long, decode, encode
from dejavu.transport.job_loop import JobLoop
from dejavu.transport.local import LocalNetwork
from dejavu.transport.outgoing import Outgoing, TagCounter
from dejavu.transport.pieces import as_bytes, pieces_of
from dejavu.transport.proof import accept_proof, greeting_proof, new_nonce, proves
from dejavu.transport.ucx_environment import TCP_SETTINGS, tune_environment

LIMIT = CreditLimit(messages=8, num_bytes=1000)
WAIT_S = 30.0


def test_credits_below_one_message_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CreditLimit(messages=0, num_bytes=10)


def test_sender_fits_up_to_either_limit_and_a_large_message_alone() -> None:
    credits = SenderCredits(LIMIT)
    assert credits.fits(5000)
    credits.spend(600)
    assert credits.fits(400)
    assert not credits.fits(401)
    credits.gain(1, 600)
    assert credits.fits(5000)


def test_sender_is_told_of_credits_that_it_never_spent() -> None:
    credits = SenderCredits(LIMIT)
    credits.spend(10)
    with pytest.raises(ValueError, match="never sent"):
        credits.gain(2, 10)


def test_receiver_puts_off_small_reports_until_a_quarter_is_owed_or_the_sender_wants_it() -> None:
    credits = ReceiverCredits(LIMIT)
    for _ in range(3):
        assert credits.hold(10)
    credits.release(10)
    assert credits.report() is None
    credits.release(10)
    assert credits.report() == (2, 20)
    credits.want()
    assert credits.report() is None
    credits.release(10)
    assert credits.report() == (1, 10)


def test_receiver_notices_a_sender_that_has_no_credits() -> None:
    credits = ReceiverCredits(LIMIT)
    assert credits.hold(900)
    assert not credits.hold(200)


def test_frame_in_a_larger_buffer_is_read_back() -> None:
    head = Head(b"header", b"", (1, 2, 3), 7)
    buffer = bytearray(FRAME_BYTES)
    encoded = encode(head)
    buffer[: len(encoded)] = encoded
    assert decode(memoryview(buffer)) == head


@pytest.mark.parametrize(
    "rubbish", [b"\xff" * 64, b"\x10\0\0\0" + b"\xc1" * 60, bytes(64), bytes(encode(Credit(1, 2)))[:-1]]
)
def test_bytes_that_are_no_frame_raise_frame_error(rubbish: bytes) -> None:
    with pytest.raises(FrameError):
        decode(memoryview(rubbish))


def test_small_payload_rides_in_the_frame_and_large_ones_follow_under_their_own_tags() -> None:
    tags = TagCounter()
    small = Outgoing(b"h", [memoryview(b"abc"), memoryview(b"def")], timeout_s=1).transfers(tags)
    assert [tag for tag, _ in small] == [FRAME_TAG]
    assert decode(small[0][1]) == Head(b"h", b"abcdef", (), 1)
    large = Outgoing(b"h", [memoryview(bytes(100_000)), memoryview(bytes(200_000))], timeout_s=1).transfers(tags)
    assert [(tag, buffer.nbytes) for tag, buffer in large[1:]] == [(1, 100_000), (2, 200_000)]


def test_head_that_is_longer_than_a_frame_follows_its_announcement() -> None:
    transfers = Outgoing(bytes(20_000), (), timeout_s=1).transfers(TagCounter())
    assert decode(transfers[0][1]) == Long(transfers[1][1].nbytes, transfers[1][0])
    assert decode(transfers[1][1]) == Head(bytes(20_000), b"", (), 1)


def test_runs_of_small_buffers_are_packed_and_large_ones_are_not_copied() -> None:
    large = np.zeros(1 << 20, np.uint8)
    small = [memoryview(bytes([value]) * 2000) for value in range(100)]
    pieces = pieces_of(as_bytes([*small, large.data, *small, memoryview(b"")]))
    assert [piece.nbytes for piece in pieces] == [200_000, 1 << 20, 200_000]
    assert np.shares_memory(np.frombuffer(pieces[1], np.uint8), large)


def test_buffer_of_another_shape_and_type_is_seen_as_its_bytes() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert bytes(as_bytes([array.data])[0]) == array.tobytes()


def test_buffer_is_used_again_for_a_similar_size_and_idle_memory_is_bounded() -> None:
    pool = BufferPool(idle_bytes=2_000_000)
    first = pool.take(1_000_000)
    pool.give(first)
    assert pool.take(1_010_000) is first
    pool.give(first)
    pool.give(np.empty(size_class(1_500_000), np.uint8))
    assert pool.held_bytes == first.nbytes


@pytest.mark.parametrize("num_bytes", [1, 65_536, 65_537, 100_000, 1 << 20, (1 << 20) + 1, 64 << 20, (1 << 30) + 7])
def test_size_class_is_at_least_the_size_and_at_most_a_quarter_more(num_bytes: int) -> None:
    assert num_bytes <= size_class(num_bytes) <= max(65_536, 1.25 * num_bytes + 1)
    assert size_class(size_class(num_bytes)) == size_class(num_bytes)


def test_proof_holds_for_one_secret_nonce_hello_and_direction_only() -> None:
    nonce = new_nonce()
    proof = greeting_proof("s", nonce=nonce, hello=b"h")
    assert proves(greeting_proof("s", nonce=nonce, hello=b"h"), proof)
    assert not proves(greeting_proof("t", nonce=nonce, hello=b"h"), proof)
    assert not proves(greeting_proof("s", nonce=new_nonce(), hello=b"h"), proof)
    assert not proves(greeting_proof("s", nonce=nonce, hello=b"i"), proof)
    assert not proves(accept_proof("s", nonce=nonce, hello=b"h"), proof)


def test_job_loop_outlives_a_job_that_fails_and_takes_none_after_stop() -> None:
    loop = JobLoop("test-loop")
    loop.start()
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 // 0, WAIT_S)
    loop.submit(lambda: _fail())
    assert loop.call(loop.on_own_thread, WAIT_S)
    loop.stop()
    loop.stop()
    assert not loop.submit(lambda: None)
    with pytest.raises(TimeoutError):
        loop.call(lambda: None, WAIT_S)
    assert all(thread.name != "test-loop" for thread in threading.enumerate())


def test_job_loop_runs_every_job_that_comes_as_it_goes_to_sleep() -> None:
    loop = JobLoop("test")
    loop.start()
    try:
        for number in range(2000):
            assert loop.call(lambda number=number: number, 10.0) == number
    finally:
        loop.stop()


def test_job_loop_timers_fire_in_order_and_a_cancelled_one_does_not() -> None:
    loop = JobLoop("test-loop")
    loop.start()
    fired: list[str] = []
    last: Future[None] = Future()

    def arrange() -> None:
        loop.later(0.02, lambda: last.set_result(None))
        loop.later(0.01, lambda: fired.append("second"))
        loop.later(0.0, lambda: fired.append("first"))
        loop.later(0.005, lambda: fired.append("cancelled"))()

    loop.call(arrange, WAIT_S)
    last.result(WAIT_S)
    loop.stop()
    assert fired == ["first", "second"]


def test_environment_gets_every_setting_except_those_of_the_user() -> None:
    environment = {"UCX_RNDV_SCHEME": "get_zcopy"}
    tune_environment(TCP_SETTINGS, environment=environment)
    assert environment == {**TCP_SETTINGS, "UCX_RNDV_SCHEME": "get_zcopy"}


def test_factory_names_the_valid_kinds_for_an_unknown_one() -> None:
    with pytest.raises(ConfigError, match="ucx"):
        make_transport("ucxx", "s", MappingProxyType({}))


def test_factory_refuses_local_without_a_network_and_makes_it_with_one() -> None:
    with pytest.raises(ConfigError, match="one process"):
        make_transport("local", "s", {})
    make_transport("local", "s", {}, network=LocalNetwork()).close()


def test_ucx_without_a_binding_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="ucxx-cu13"):
        ucx.installed_binding()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "ucp" else None)
    assert ucx.installed_binding() == "ucp"


def _fail() -> None:
    raise RuntimeError("a job's mistake")
