"""The contract of dejavu/transport/base.py, on every transport."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from dejavu.transport.base import MAX_HEADER_BYTES, Inbound, Link, LinkRefused, TransportError
from dejavu.transport.credits import CreditLimit

from harness.transport_kit import WAIT_S, Bench, Inbox, hello, noise, num_descriptors, transport_maker

KINDS = ["local", "ucp-stand-in", pytest.param("ucx", marks=pytest.mark.slow)]


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    # UCX keeps a closed context's descriptors when one of its links was aborted in mid-send, so they are counted for
    # it by test_transport_ucx alone, without aborts.
    made = Bench(transport_maker(request.param, monkeypatch), counts_descriptors=request.param != "ucx")
    yield made
    made.finish()


def send_until_it_fails(link: Link) -> None:
    for _ in range(1000):
        link.send(b"to the dead").result(WAIT_S)


def test_messages_of_one_link_of_mixed_sizes_arrive_whole_and_in_order(bench: Bench) -> None:
    inbox = Inbox()
    address = bench.transport().listen(inbox)
    link = bench.transport().connect(address, hello(), peer="w1")
    sizes = [0, 1, 8 << 10, (8 << 10) + 1, 1 << 20, 3, 64 << 20, 100_000, 0]
    payloads = [noise(size, seed) for seed, size in enumerate(sizes)]
    futures = [link.send(b"%d" % index, [payload.data]) for index, payload in enumerate(payloads)]
    for index, payload in enumerate(payloads):
        message = inbox.take()
        assert message.header == b"%d" % index
        assert np.array_equal(np.frombuffer(message.payload, np.uint8), payload)
        assert message.hello.name == "w0"
        message.release()
        message.release()
    for future in futures:
        assert future.result(WAIT_S) is None


def test_payload_of_many_buffers_arrives_as_their_concatenation(bench: Bench) -> None:
    inbox = Inbox()
    address = bench.transport().listen(inbox)
    link = bench.transport().connect(address, hello(), peer="w1")
    sizes = [2_000] * 1500 + [70_000, 0, 5, 65_536] + [65_536] * 2500
    buffers = [noise(size, seed).data for seed, size in enumerate(sizes)]
    link.send(b"x" * MAX_HEADER_BYTES, buffers).result(WAIT_S)
    message = inbox.take()
    assert hashlib.sha256(message.payload).digest() == hashlib.sha256(b"".join(buffers)).digest()
    assert len(message.header) == MAX_HEADER_BYTES
    message.release()


def test_many_links_at_once_keep_their_messages_apart(bench: Bench) -> None:
    inbox = Inbox()
    address = bench.transport().listen(inbox)
    sender = bench.transport()
    links = [sender.connect(address, hello(f"w{index}"), peer="hub") for index in range(16)]
    for index, link in enumerate(links):
        for round_index in range(5):
            link.send(b"%d" % round_index, [noise(200_000, 100 * index + round_index).data])
    seen: dict[str, int] = {}
    for _ in range(16 * 5):
        message = inbox.take()
        name = message.hello.name
        round_index = seen.get(name, 0)
        seen[name] = round_index + 1
        assert message.header == b"%d" % round_index
        expected = noise(200_000, 100 * int(name[1:]) + round_index)
        assert np.array_equal(np.frombuffer(message.payload, np.uint8), expected)
        message.release()


def test_sender_without_credits_waits_and_goes_on_when_messages_are_released(bench: Bench) -> None:
    inbox = Inbox()
    address = bench.transport(credits=CreditLimit(messages=3, num_bytes=1 << 20)).listen(inbox)
    link = bench.transport().connect(address, hello(), peer="w1")
    futures = [link.send(b"%d" % index) for index in range(10)]
    held: list[Inbound] = [inbox.take() for _ in range(3)]
    for expected in range(3, 10):
        assert inbox.messages.empty()
        assert not futures[expected].done()
        held.pop(0).release()
        held.append(inbox.take())
        assert held[-1].header == b"%d" % expected


def test_sender_that_gets_no_credits_fails_at_its_deadline_and_receiver_holds_no_more_than_the_limit(
    bench: Bench,
) -> None:
    inbox = Inbox()
    limit = CreditLimit(messages=100, num_bytes=1 << 20)
    address = bench.transport(credits=limit).listen(inbox, host="127.0.0.1")
    link = bench.transport().connect(address, hello(), peer="w1")
    chunk = noise(400 << 10)
    futures = [link.send(b"", [chunk.data], timeout_s=0.3) for _ in range(5)]
    with pytest.raises(TransportError, match="no credits") as caught:
        futures[-1].result(WAIT_S)
    assert (caught.value.peer, caught.value.address, caught.value.phase) == ("w1", address, "send")
    assert not link.alive
    assert inbox.losses.get(timeout=WAIT_S)[0] == "w0"
    assert inbox.messages.qsize() == 2
    with pytest.raises(TransportError, match="gone"):
        link.send(b"late").result(WAIT_S)


def test_message_larger_than_all_credits_goes_alone(bench: Bench) -> None:
    inbox = Inbox()
    address = bench.transport(credits=CreditLimit(messages=4, num_bytes=1 << 20)).listen(inbox)
    link = bench.transport().connect(address, hello(), peer="w1")
    for size in (1 << 19, 3 << 20, 1 << 19, 3 << 20):
        link.send(b"", [noise(size).data])
    for size in (1 << 19, 3 << 20, 1 << 19, 3 << 20):
        message = inbox.take()
        assert message.payload.nbytes == size
        message.release()


def test_wrong_secret_is_refused_before_the_handler_hears_of_it(bench: Bench) -> None:
    inbox = Inbox()
    address = bench.transport().listen(inbox)
    stranger = bench.transport("another secret")
    with pytest.raises(LinkRefused, match="secret") as caught:
        stranger.connect(address, hello(), peer="w1")
    assert caught.value.phase == "handshake"
    assert inbox.losses.empty()


def test_refusal_by_the_handler_arrives_with_its_reason(bench: Bench) -> None:
    address = bench.transport().listen(Inbox())
    with pytest.raises(LinkRefused, match="epoch 7 is stale, the plan is at 1"):
        bench.transport().connect(address, hello(epoch=7), peer="w1")


def test_connect_to_a_dead_port_fails_within_the_deadline_and_names_address_and_phase(bench: Bench) -> None:
    listener = bench.transport()
    address = listener.listen(Inbox())
    listener.close()
    with pytest.raises(TransportError) as caught:
        bench.transport().connect(address, hello(), peer="w1", timeout_s=0.5)
    assert (caught.value.peer, caught.value.address, caught.value.phase) == ("w1", address, "connect")
    assert address in str(caught.value)


def test_connect_before_the_listener_is_there_succeeds_once_it_is(bench: Bench) -> None:
    first = bench.transport()
    address = first.listen(Inbox())
    first.close()
    port = int(address.rpartition(":")[2])
    connecting = bench.transport()
    links = []
    thread = threading.Thread(target=lambda: links.append(connecting.connect(address, hello(), peer="w1")))
    thread.start()
    bench.transport().listen(Inbox(), port=port)
    thread.join(WAIT_S)
    assert links[0].alive


def test_peer_that_restarts_on_its_port_is_reached_by_a_new_link(bench: Bench) -> None:
    connecting = bench.transport()
    port = 0
    for _ in range(5):
        inbox, listener = Inbox(), bench.transport()
        address = listener.listen(inbox, port=port)
        port = int(address.rpartition(":")[2])
        link = connecting.connect(address, hello(), peer="w1")
        link.send(b"again", [noise(100_000).data]).result(WAIT_S)
        inbox.take().release()
        listener.close()
        with pytest.raises(TransportError):
            send_until_it_fails(link)
        assert not link.alive


def test_port_that_is_taken_is_an_error_that_names_it(bench: Bench) -> None:
    address = bench.transport().listen(Inbox())
    with pytest.raises(TransportError, match="listen") as caught:
        bench.transport().listen(Inbox(), port=int(address.rpartition(":")[2]))
    assert caught.value.address == address


def test_close_right_after_send_delivers_every_byte_to_a_receiver_that_is_slow(bench: Bench) -> None:
    inbox = Inbox()
    go_on, blocked = threading.Event(), threading.Event()

    def slow(message: Inbound) -> None:
        blocked.set()
        assert go_on.wait(WAIT_S)
        inbox.messages.put(message)

    inbox.received = slow  # type: ignore[method-assign]
    address = bench.transport().listen(inbox)
    link = bench.transport().connect(address, hello(), peer="w1")
    payloads = [noise(8 << 20, seed) for seed in range(4)]
    for payload in payloads:
        link.send(b"", [payload.data])
    closing = threading.Thread(target=link.close, args=(WAIT_S,))
    closing.start()
    assert blocked.wait(WAIT_S)
    go_on.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    for payload in payloads:
        assert np.array_equal(np.frombuffer(inbox.take().payload, np.uint8), payload)
    assert inbox.losses.get(timeout=WAIT_S) == ("w0", "closed by the peer")
    link.close()


def test_close_that_cannot_flush_raises_at_its_deadline_and_ends_the_link(bench: Bench) -> None:
    inbox = Inbox()
    address = bench.transport(credits=CreditLimit(messages=1, num_bytes=1 << 20)).listen(inbox)
    link = bench.transport().connect(address, hello(), peer="w1")
    futures = [link.send(b"", [noise(1000).data]) for _ in range(2)]
    with pytest.raises(TransportError) as caught:
        link.close(0.2)
    assert (caught.value.phase, caught.value.address) == ("close", address)
    with pytest.raises(TransportError):
        futures[1].result(WAIT_S)


def test_abort_fails_pending_sends_and_tells_the_receiver(bench: Bench) -> None:
    inbox = Inbox()
    address = bench.transport(credits=CreditLimit(messages=1, num_bytes=1 << 20)).listen(inbox)
    link = bench.transport().connect(address, hello(), peer="w1")
    futures = [link.send(b"", [noise(1 << 20).data]) for _ in range(4)]
    inbox.take()
    link.abort()
    link.abort()
    assert not link.alive
    with pytest.raises(TransportError, match="aborted"):
        futures[3].result(0)
    assert inbox.losses.get(timeout=WAIT_S)[0] == "w0"


def test_aborted_link_leaves_other_links_alone(bench: Bench) -> None:
    inbox = Inbox()
    address = bench.transport().listen(inbox)
    sender = bench.transport()
    doomed, other = (sender.connect(address, hello(name), peer="hub") for name in ("w0", "w1"))
    payload = noise(16 << 20)
    for _ in range(4):
        doomed.send(b"", [payload.data])
    doomed.abort()
    other.send(b"still here", [payload.data]).result(WAIT_S)
    while (message := inbox.take()).hello.name != "w1":
        message.release()
    assert np.array_equal(np.frombuffer(message.payload, np.uint8), payload)


def test_handler_that_fails_ends_its_link_and_not_the_transport(bench: Bench) -> None:
    inbox = Inbox()

    def broken(message: Inbound) -> None:
        if message.hello.name == "w0":
            raise RuntimeError("the handler's mistake")
        inbox.messages.put(message)

    inbox.received = broken  # type: ignore[method-assign]
    address = bench.transport().listen(inbox)
    sender = bench.transport()
    sender.connect(address, hello("w0"), peer="hub").send(b"")
    assert inbox.losses.get(timeout=WAIT_S) == ("w0", "the handler failed on a message")
    sender.connect(address, hello("w1"), peer="hub").send(b"fine").result(WAIT_S)
    assert inbox.take().header == b"fine"


def test_memory_with_gaps_and_oversized_headers_are_refused_at_once(bench: Bench) -> None:
    link = bench.transport().connect(bench.transport().listen(Inbox()), hello(), peer="w1")
    with pytest.raises(ValueError, match="C-contiguous"):
        link.send(b"", [noise(100)[::2].data])
    with pytest.raises(ValueError, match="header"):
        link.send(b"x" * (MAX_HEADER_BYTES + 1))
    assert link.alive


def test_closed_transport_refuses_work_and_closes_again(bench: Bench) -> None:
    transport = bench.transport()
    transport.close()
    transport.close()
    with pytest.raises(RuntimeError, match="closed"):
        transport.connect("127.0.0.1:1", hello(), peer="w1")
    with pytest.raises(RuntimeError, match="after listen"):
        _ = transport.address


def test_one_link_carries_thousands_of_messages_with_a_flat_number_of_descriptors(bench: Bench) -> None:
    inbox = Inbox()
    address = bench.transport().listen(inbox)
    link = bench.transport().connect(address, hello(), peer="w1")
    payload = noise(10_000)
    before = 0
    for index in range(3000):
        future = link.send(b"", [payload.data])
        inbox.take().release()
        future.result(WAIT_S)
        if index == 100:
            before = num_descriptors()
    assert num_descriptors() == before
