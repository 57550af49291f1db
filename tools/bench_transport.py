"""Latency and bandwidth of the UCX transport between two processes of this machine, as a table of medians.

    python tools/bench_transport.py [--rounds 20]

Half a round trip: a message of each size goes there and an equal one comes back. One way: messages are sent back to
back, as many as the credits allow, and timed until the last one is acknowledged.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np

from dejavu.transport.base import Hello, Inbound
from dejavu.transport.ucx import UcxTransport

_SECRET = "bench"
_SIZES = (4 << 10, 64 << 10, 1 << 20, 64 << 20)
_TIMEOUT_S = 60.0


class _Queue:
    """A handler that lets a thread wait for messages."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Inbound] = queue.Queue()

    def admit(self, hello: Hello) -> str | None:
        return None

    def received(self, message: Inbound) -> None:
        self.messages.put(message)

    def lost(self, hello: Hello, reason: str) -> None:
        """The other process is done."""


def _hello(name: str) -> Hello:
    return Hello(cluster="bench", name=name, incarnation="1", epoch=1)


def _echo(pipe: Connection) -> None:
    """Answers ``echo`` with the same payload, ``last`` with nothing, and the rest not at all."""
    transport, handler = UcxTransport(_SECRET), _Queue()
    pipe.send(transport.listen(handler))
    link = transport.connect(pipe.recv(), _hello("echo"), peer="bench")
    while True:
        message = handler.messages.get(timeout=_TIMEOUT_S)
        header = message.header
        if header == b"echo":
            link.send(b"", [message.payload]).result(_TIMEOUT_S)
        message.release()
        if header == b"last":
            link.send(b"").result(_TIMEOUT_S)
        if header == b"stop":
            break
    transport.close()


def _measure(rounds: int) -> list[tuple[int, float, float]]:
    spawn = multiprocessing.get_context("spawn")
    pipe, other_end = spawn.Pipe()
    process = spawn.Process(target=_echo, args=(other_end,))
    process.start()
    transport, handler = UcxTransport(_SECRET), _Queue()
    address = transport.listen(handler)
    link = transport.connect(pipe.recv(), _hello("bench"), peer="echo")
    pipe.send(address)
    print(f"link: {link.description}")
    rows = []
    for size in _SIZES:
        payload = np.ones(size, dtype=np.uint8).data
        half_trips, one_ways = [], []
        for _ in range(rounds):
            begin = time.perf_counter()
            link.send(b"echo", [payload])
            handler.messages.get(timeout=_TIMEOUT_S).release()
            half_trips.append((time.perf_counter() - begin) / 2)
        for _ in range(max(3, rounds // 4)):
            begin = time.perf_counter()
            for index in range(8):
                link.send(b"last" if index == 7 else b"", [payload])
            handler.messages.get(timeout=_TIMEOUT_S).release()
            one_ways.append((time.perf_counter() - begin) / 8)
        rows.append((size, statistics.median(half_trips), statistics.median(one_ways)))
    link.send(b"stop").result(_TIMEOUT_S)
    process.join()
    transport.close()
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rows = _measure(parser.parse_args().rounds)
    print(f"{'bytes':>10} {'half round trip ms':>19} {'one way ms':>11} {'one way GB/s':>13}")
    for size, half_trip_s, one_way_s in rows:
        print(f"{size:>10} {half_trip_s * 1e3:>19.3f} {one_way_s * 1e3:>11.3f} {size / one_way_s / 1e9:>13.2f}")


if __name__ == "__main__":
    main()
