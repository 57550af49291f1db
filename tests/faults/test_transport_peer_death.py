"""A peer that is killed or frozen costs its own links and nothing else."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import pytest
import xxhash

from dejavu.transport.base import Hello, Inbound, TransportError
from dejavu.transport.ucx import UcxTransport

from harness.transport_kit import noise

pytestmark = [pytest.mark.slow, pytest.mark.faults]
SECRET = "a secret of these tests"
WAIT_S = 60.0
PAYLOAD_BYTES = 64 << 20
NAME_OF_THE_DOOMED = "doomed"


class Inbox:
    """Keeps messages and losses; a process that is told to dies at its first message."""

    def __init__(self, *, dies: bool = False) -> None:
        self.messages: queue.Queue[Inbound] = queue.Queue()
        self.losses: queue.Queue[tuple[str, str]] = queue.Queue()
        self._dies = dies

    def admit(self, hello: Hello) -> str | None:
        return None

    def received(self, message: Inbound) -> None:
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        self.messages.put(message)

    def lost(self, hello: Hello, reason: str) -> None:
        self.losses.put((hello.name, reason))


def hello(name: str) -> Hello:
    return Hello(cluster="c", name=name, incarnation="i", epoch=1)


def listen_and(dies: bool, pipe: Connection) -> None:
    """The doomed process as a receiver: the next messages are on their way when it dies at the first."""
    transport = UcxTransport(SECRET)
    pipe.send(transport.listen(Inbox(dies=dies)))
    pipe.recv()


def send_for_ever(address: str) -> None:
    """The doomed process as a sender."""
    link = UcxTransport(SECRET).connect(address, hello(NAME_OF_THE_DOOMED), peer="survivor")
    payload = memoryview(bytes(PAYLOAD_BYTES))
    while True:
        link.send(b"", [payload]).result(WAIT_S)


def send_close_and_die(address: str, num_messages: int, pipe: Connection) -> None:
    """A sender that has nothing more to say, and no patience: it is gone the moment ``close`` has returned."""
    link = UcxTransport(SECRET).connect(address, hello(NAME_OF_THE_DOOMED), peer="survivor")
    for seed in range(num_messages):
        link.send(b"", [noise(PAYLOAD_BYTES // 8, seed).data])
    pipe.send("closing")
    link.close(WAIT_S)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def survivor() -> Iterator[UcxTransport]:
    transport = UcxTransport(SECRET)
    yield transport
    transport.close()


@pytest.fixture
def processes() -> Iterator[list[SpawnProcess]]:
    started: list[SpawnProcess] = []
    yield started
    for process in started:
        process.kill()
        process.join(WAIT_S)
        assert not process.is_alive()


def doomed_listener(processes: list[SpawnProcess], *, dies: bool) -> str:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=listen_and, args=(dies, theirs))
    process.start()
    processes.append(process)
    assert ours.poll(WAIT_S)
    address: str = ours.recv()
    process._pipe_kept_open = ours  # type: ignore[attr-defined]
    return address


def test_receiver_killed_in_a_large_message_fails_its_link_only(
    survivor: UcxTransport, processes: list[SpawnProcess]
) -> None:
    inbox, healthy = Inbox(), UcxTransport(SECRET)
    good = survivor.connect(healthy.listen(inbox), hello("w0"), peer="healthy")
    address = doomed_listener(processes, dies=True)
    bad = survivor.connect(address, hello("w0"), peer=NAME_OF_THE_DOOMED)
    payload = memoryview(bytes(PAYLOAD_BYTES))
    futures = [bad.send(b"", [payload]) for _ in range(8)]
    with pytest.raises(TransportError) as caught:
        futures[-1].result(WAIT_S)
    assert (caught.value.peer, caught.value.address, caught.value.phase) == (NAME_OF_THE_DOOMED, address, "send")
    assert not bad.alive
    good.send(b"fine", [payload]).result(WAIT_S)
    assert inbox.messages.get(timeout=WAIT_S).payload.nbytes == PAYLOAD_BYTES
    healthy.close()


def test_sender_killed_in_a_large_message_is_reported_as_lost(
    survivor: UcxTransport, processes: list[SpawnProcess]
) -> None:
    inbox = Inbox()
    address = survivor.listen(inbox)
    process = multiprocessing.get_context("spawn").Process(target=send_for_ever, args=(address,))
    process.start()
    processes.append(process)
    inbox.messages.get(timeout=WAIT_S).release()
    process.kill()
    assert inbox.losses.get(timeout=WAIT_S)[0] == NAME_OF_THE_DOOMED
    link = survivor.connect(address, hello("w0"), peer="itself")
    link.send(b"fine").result(WAIT_S)


def test_frozen_receiver_fails_a_send_at_its_deadline(survivor: UcxTransport, processes: list[SpawnProcess]) -> None:
    address = doomed_listener(processes, dies=False)
    link = survivor.connect(address, hello("w0"), peer="frozen")
    pid = processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    payload = memoryview(bytes(PAYLOAD_BYTES))
    with pytest.raises(TransportError, match="deadline") as caught:
        link.send(b"", [payload], timeout_s=1.0).result(WAIT_S)
    assert caught.value.address == address
    assert not link.alive


def test_sender_that_closes_and_dies_at_once_loses_no_byte_to_a_receiver_that_is_slow(
    survivor: UcxTransport, processes: list[SpawnProcess]
) -> None:
    """Field report B25: the receiver takes nothing before the sender closes, and looks only when it is dead."""
    inbox, go_on = Inbox(), threading.Event()
    took = inbox.received

    def slow(message: Inbound) -> None:
        assert go_on.wait(WAIT_S)
        took(message)

    inbox.received = slow  # type: ignore[method-assign]
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=send_close_and_die, args=(survivor.listen(inbox), 4, theirs))
    process.start()
    processes.append(process)
    assert ours.poll(WAIT_S)
    go_on.set()
    process.join(WAIT_S)
    assert process.exitcode == -signal.SIGKILL
    for seed in range(4):
        message = inbox.messages.get(timeout=WAIT_S)
        expected = noise(PAYLOAD_BYTES // 8, seed)
        assert xxhash.xxh3_64_intdigest(message.payload) == xxhash.xxh3_64_intdigest(expected)
        message.release()
    assert inbox.losses.get(timeout=WAIT_S)[0] == NAME_OF_THE_DOOMED


def test_sender_killed_in_a_large_message_leaves_the_links_of_others_as_they_were(
    survivor: UcxTransport, processes: list[SpawnProcess]
) -> None:
    inbox, other = Inbox(), UcxTransport(SECRET)
    address = survivor.listen(inbox)
    good = other.connect(address, hello("w0"), peer="survivor")
    process = multiprocessing.get_context("spawn").Process(target=send_for_ever, args=(address,))
    process.start()
    processes.append(process)
    sequence: list[int] = []
    payload = memoryview(bytes(1 << 20))
    num_sent = 0
    while inbox.losses.empty():
        sent = good.send(b"%d" % num_sent, [payload])
        num_sent += 1
        while len(sequence) < num_sent:
            message = inbox.messages.get(timeout=WAIT_S)
            if message.hello.name == "w0":
                sequence.append(int(message.header))
            else:
                process.kill()
            message.release()
        sent.result(WAIT_S)
    assert inbox.losses.get(timeout=WAIT_S)[0] == NAME_OF_THE_DOOMED
    assert sequence == list(range(num_sent))
    assert good.alive
    other.close()
    assert inbox.losses.get(timeout=WAIT_S)[0] == "w0"


def test_connect_to_a_frozen_listener_fails_within_the_deadline_and_names_address_and_phase(
    survivor: UcxTransport, processes: list[SpawnProcess]
) -> None:
    address = doomed_listener(processes, dies=False)
    pid = processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TransportError) as caught:
        survivor.connect(address, hello("w0"), peer="frozen", timeout_s=0.5)
    assert (caught.value.peer, caught.value.address) == ("frozen", address)
    assert caught.value.phase in {"connect", "handshake"}
    assert address in str(caught.value)
