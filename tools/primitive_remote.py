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


class Waiting:
    """A transport's handler and a core's callbacks, for a thread that waits for them."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Inbound] = queue.Queue()
        self.done: queue.Queue[CoreError | None] = queue.Queue()

    def admit(self, hello: Hello) -> str | None:
        """Everybody."""
        return None

    def received(self, message: Inbound) -> None:
        """The message waits."""
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
        num_messages, raw_bytes = order
        if raw_bytes == 0:
            for _ in range(num_messages):
                waiting.messages.get(timeout=TIMEOUT_S).release()
            link.send(b"all").result(TIMEOUT_S)
            continue
        target = target if len(target) == raw_bytes else bytearray(raw_bytes)
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

    def __init__(self, sample_bytes: int, chunk_sizes: Sequence[int]) -> None:
        self._payload = memoryview(bytearray(b"1") * max(chunk_sizes))
        self._num_raw = max(2, sample_bytes // self._payload.nbytes)
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

    def raw(self) -> tuple[int, float]:
        """Bytes and seconds of large messages of UCX alone."""
        self._pipe.send((self._num_raw, self._payload.nbytes))
        self._pipe.recv()
        return self._num_raw * self._payload.nbytes, timed(self._send_raw)

    def moved(self, chunks: Chunks, staging: StagingRing) -> float:
        """Seconds of gather and flush, until the other side has all messages."""
        self._pipe.send((chunks.num_chunks, 0))
        return timed(lambda: self._send(chunks, staging))

    def close(self) -> None:
        """The other process is gone."""
        self._pipe.send(None)
        self._process.join(TIMEOUT_S)
        self._transport.close()
        self._core.stop()

    def _send(self, chunks: Chunks, staging: StagingRing) -> None:
        gather_and_flush(chunks, staging, lambda _: self._destination)
        self._waiting.messages.get(timeout=TIMEOUT_S).release()

    def _send_raw(self) -> None:
        endpoint, done, answered = self._endpoint, self._waiting.done.put, memoryview(bytearray(1))
        self._core.submit(lambda: endpoint.recv(_ANSWER_TAG, answered, done))
        for _ in range(self._num_raw):
            self._core.submit(lambda: endpoint.send(_DATA_TAG, self._payload, done))
        self._waiting.wait(self._num_raw + 1)
