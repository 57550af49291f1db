"""Big messages, and many streams at once between the same two peers: each message whole, each link in its order."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from dejavu.transport.base import Inbound, Link

from harness.transport_kit import WAIT_S, Bench, Inbox, hello, noise, transport_maker

KINDS = ["local", "ucp-stand-in", pytest.param("ucx", marks=pytest.mark.slow)]
SMALL_BYTES, LARGE_BYTES = 600, 3_000_000
BIG_BYTES = 1_181_116_006
"""1.1 GiB: its size fits neither 30 bits nor any block."""


class Label(msgspec.Struct, frozen=True, array_like=True):
    """The header of these tests' messages."""

    link: str
    sequence: int
    num_bytes: int
    digest: int


class Stream:
    """One link that any number of threads send through; it numbers what is sent."""

    def __init__(self, link: Link, name: str) -> None:
        self._link, self._name = link, name
        self._lock = threading.Lock()
        self._sequence = itertools.count()

    def send(self, payload: np.ndarray[Any, np.dtype[np.uint8]]) -> Future[None]:
        digest = xxhash.xxh3_64_intdigest(payload)
        with self._lock:
            label = Label(self._name, next(self._sequence), payload.nbytes, digest)
            return self._link.send(msgspec.msgpack.encode(label), [payload.data], timeout_s=WAIT_S)


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(transport_maker(request.param, monkeypatch), counts_descriptors=request.param != "ucx")
    yield made
    made.finish()


@pytest.fixture(params=[pytest.param("local", marks=pytest.mark.grid), "ucx"])
def big_bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(transport_maker(request.param, monkeypatch), counts_descriptors=request.param != "ucx")
    yield made
    made.finish()


def send_interleaved(stream: Stream, thread_index: int, num_messages: int) -> None:
    """Small and large messages in a random order; each buffer is spoilt once its future says that it may be."""
    chooser = random.Random(thread_index)
    on_their_way: list[tuple[Future[None], np.ndarray[Any, np.dtype[np.uint8]]]] = []
    for index in range(num_messages):
        most = LARGE_BYTES if chooser.random() < 0.2 else SMALL_BYTES
        payload = noise(chooser.randint(0, most), 1000 * thread_index + index)
        on_their_way.append((stream.send(payload), payload))
        if len(on_their_way) > 4:
            done, buffer = on_their_way.pop(0)
            done.result(WAIT_S)
            buffer[:] = 0xEE
    for done, _ in on_their_way:
        done.result(WAIT_S)


def send_from_threads(streams: Sequence[Stream], num_messages: int) -> list[threading.Thread]:
    """A running thread for each entry of ``streams``, in which a stream may appear several times."""
    threads = [
        threading.Thread(target=send_interleaved, args=(stream, index, num_messages), name=f"sender-{index}")
        for index, stream in enumerate(streams)
    ]
    for thread in threads:
        thread.start()
    return threads


def check_all(inbox: Inbox, num_messages: int) -> dict[str, int]:
    """So many messages came, each whole, on its own link and in that link's order; how many on each link."""
    counts: dict[str, int] = {}
    for _ in range(num_messages):
        message = inbox.take()
        label = msgspec.msgpack.decode(message.header, type=Label)
        assert label.link == message.hello.name
        assert label.sequence == counts.get(label.link, 0)
        assert is_whole(message, label)
        counts[label.link] = label.sequence + 1
        message.release()
    return counts


def is_whole(message: Inbound, label: Label) -> bool:
    same_size = message.payload.nbytes == label.num_bytes
    return same_size and xxhash.xxh3_64_intdigest(message.payload) == label.digest


def join_all(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_threads_that_share_a_link_do_not_mix_their_messages(bench: Bench) -> None:
    inbox = Inbox()
    address = bench.transport().listen(inbox)
    stream = Stream(bench.transport().connect(address, hello("one"), peer="hub"), "one")
    threads = send_from_threads([stream] * 4, 40)
    assert check_all(inbox, 160) == {"one": 160}
    join_all(threads)
    assert inbox.messages.empty()


def test_links_between_the_same_two_peers_keep_their_own_order_and_bytes(bench: Bench) -> None:
    inbox = Inbox()
    address = bench.transport().listen(inbox)
    sender = bench.transport()
    names = [f"w{index}" for index in range(4)]
    streams = [Stream(sender.connect(address, hello(name), peer="hub"), name) for name in names]
    threads = send_from_threads([*streams, *streams], 20)
    assert check_all(inbox, 160) == dict.fromkeys(names, 40)
    join_all(threads)


def test_peers_that_send_to_each_other_at_once_both_get_everything(bench: Bench) -> None:
    inboxes = [Inbox(), Inbox()]
    ends = [bench.transport(), bench.transport()]
    addresses = [end.listen(inbox) for end, inbox in zip(ends, inboxes, strict=True)]
    streams = [
        Stream(ends[0].connect(addresses[1], hello("w0"), peer="w1"), "w0"),
        Stream(ends[1].connect(addresses[0], hello("w1"), peer="w0"), "w1"),
    ]
    threads = send_from_threads([*streams, *streams], 20)
    assert check_all(inboxes[1], 40) == {"w0": 40}
    assert check_all(inboxes[0], 40) == {"w1": 40}
    join_all(threads)


@pytest.mark.slow
def test_message_of_more_than_a_gibibyte_arrives_whole_between_empty_ones(big_bench: Bench) -> None:
    inbox = Inbox()
    address = big_bench.transport().listen(inbox)
    stream = Stream(big_bench.transport().connect(address, hello("one"), peer="hub"), "one")
    big = numbered_words(BIG_BYTES)
    futures = [stream.send(payload) for payload in (big[:0], big, big[:0])]
    assert check_all(inbox, 3) == {"one": 3}
    for future in futures:
        future.result(WAIT_S)


def numbered_words(num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes of which each eight are its own number: whatever is lost, repeated or misplaced changes the digest."""
    return np.arange(num_bytes // 8 + 1, dtype=np.uint64).view(np.uint8)[:num_bytes]
