"""Host memory of another process, over UCX, for ``bench_primitives.py``; and UCX alone between the same two."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection

from primitive_media import CLUSTER, TIMEOUT_S, Chunks, gather_and_flush, timed

from dejavu.kv.primitives import RemoteMemory
from dejavu.kv.staging import StagingRing
from dejavu.transport.base import Hello, Inbound, Link
from dejavu.transport.core import Core, CoreEndpoint, CoreError
from dejavu.transport.ucx import UcxTransport, make_core
from dejavu.transport.ucx_environment import TCP_SETTINGS

_SECRET = "bench"
_DATA_TAG, _ANSWER_TAG = 1, 2
_RAW_BYTES = 16 << 20
"""The best size of this link alone: from here on it gets no faster."""


class Waiting:
    """A transport's handler and a core's callbacks, for a thread that waits for them."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Inbound] = queue.Queue()
        self.passed_bytes = 0
        """Messages are released as they come, without waking the thread that waits, but the one that fills this up."""
        self.done: queue.Queue[CoreError | None] = queue.Queue()

    def admit(self, hello: Hello) -> str | None:
        """Everybody."""
        return None

    def received(self, message: Inbound) -> None:
        """The message waits, or has been released."""
        self.passed_bytes -= message.payload.nbytes
        if self.passed_bytes > 0:
            message.release()
            return
        self.messages.put(message)

    def lost(self, hello: Hello, reason: str) -> None:
        """The other process is done."""

    def wait(self, num_operations: int) -> None:
        """So many of the core's operations have ended. Raises the first failure."""
        for _ in range(num_operations):
            error = self.done.get(timeout=TIMEOUT_S)
            if error is not None:
                raise error


def opened(core: Core, endpoint: CoreEndpoint, waiting: Waiting) -> CoreEndpoint:
    """The endpoint can be used."""
    core.submit(lambda: endpoint.open(waiting.done.put, lambda reason: None))
    waiting.wait(1)
    return endpoint


def answer(pipe: Connection) -> None:
    """The other process: takes messages and answers the last one, over the transport or over UCX alone, as told."""
    waiting, accepted = Waiting(), queue.Queue[CoreEndpoint]()
    transport, core = UcxTransport(_SECRET), make_core(TCP_SETTINGS)
    pipe.send((transport.listen(waiting), core.call(lambda: core.listen(0, accepted.put), TIMEOUT_S)))
    link = transport.connect(pipe.recv(), hello("other"), peer="bench")
    endpoint = opened(core, accepted.get(timeout=TIMEOUT_S), waiting)
    target = bytearray(0)
    while (order := pipe.recv()) is not None:
        num_messages, num_bytes = order
        if num_messages == 0:
            waiting.passed_bytes = num_bytes
            pipe.send("ready")
            waiting.messages.get(timeout=TIMEOUT_S).release()
            link.send(b"all").result(TIMEOUT_S)
            continue
        target = target if len(target) == num_bytes else bytearray(num_bytes)
        for _ in range(num_messages):
            core.submit(partial(endpoint.recv, _DATA_TAG, memoryview(target), waiting.done.put))
        pipe.send("ready")
        waiting.wait(num_messages)
        core.submit(lambda: endpoint.send(_ANSWER_TAG, memoryview(b"1"), waiting.done.put))
        waiting.wait(1)
    transport.close()
    core.stop()


def hello(name: str) -> Hello:
    """Who speaks."""
    return Hello(cluster=CLUSTER, name=name, incarnation="1", epoch=1)


class Sending:
    """The ``Sender`` over one link."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def send(self, owner: str, header: bytes, payload: Sequence[memoryview]) -> Future[None]:
        """Queues the message."""
        return self._link.send(header, payload, timeout_s=TIMEOUT_S)


class Remote:
    """Host memory of another process, over UCX."""

    def __init__(self) -> None:
        self._waiting = Waiting()
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other_end = spawn.Pipe()
        self._process = spawn.Process(target=answer, args=(other_end,), daemon=True)
        self._process.start()
        other_end.close()
        self._transport, self._core = UcxTransport(_SECRET), make_core(TCP_SETTINGS)
        own_address = self._transport.listen(self._waiting)
        address, port = self._pipe.recv()
        link = self._transport.connect(address, hello("bench"), peer="other", timeout_s=TIMEOUT_S)
        self._destination = RemoteMemory(owner="other", sender=Sending(link))
        self._pipe.send(own_address)
        endpoint = self._core.call(lambda: self._core.endpoint("127.0.0.1", port), TIMEOUT_S)
        self._endpoint = opened(self._core, endpoint, self._waiting)
        self.name = f"remote, {link.description}"

    def raw(self, chunks: Chunks) -> tuple[int, float]:
        """Bytes and seconds of the chunks' memory sent by UCX alone, in large messages."""
        memory = chunks.memory.numpy()
        size = min(_RAW_BYTES, chunks.num_bytes)
        pieces = [memory[begin : begin + size].data for begin in range(0, chunks.num_bytes - size + 1, size)]
        self._pipe.send((len(pieces), size))
        self._pipe.recv()
        return len(pieces) * size, timed(lambda: self._send_raw(pieces))

    def moved(self, chunks: Chunks, staging: StagingRing) -> tuple[int, float]:
        """Bytes and seconds of gather and flush, until the other side has all messages."""
        self._pipe.send((0, chunks.num_bytes))
        self._pipe.recv()
        return chunks.num_bytes, timed(lambda: self._send(chunks, staging))

    def close(self) -> None:
        """The other process is gone."""
        self._pipe.send(None)
        self._process.join(TIMEOUT_S)
        self._transport.close()
        self._core.stop()

    def _send(self, chunks: Chunks, staging: StagingRing) -> None:
        gather_and_flush(chunks, staging, self._destination)
        self._waiting.messages.get(timeout=TIMEOUT_S).release()

    def _send_raw(self, pieces: Sequence[memoryview]) -> None:
        endpoint, done, answered = self._endpoint, self._waiting.done.put, memoryview(bytearray(1))
        self._core.submit(lambda: endpoint.recv(_ANSWER_TAG, answered, done))
        for piece in pieces:
            self._core.submit(partial(endpoint.send, _DATA_TAG, piece, done))
        self._waiting.wait(len(pieces) + 1)
