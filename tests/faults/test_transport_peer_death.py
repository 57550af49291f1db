"""A peer that is killed or frozen costs its own links and nothing else."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import pytest

from dejavu.transport.base import Hello, Inbound, TransportError
from dejavu.transport.ucx import UcxTransport

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
