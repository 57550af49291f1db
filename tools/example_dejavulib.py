"""DéjàVuLib by itself: a made-up KV cache moves between pipelines of different depth and batch size, in two processes.

    python tools/example_dejavulib.py [--folder FOLDER]

The prompt side has 2 stages and batches of 2 rows, the token side 3 stages and microbatches of 3 rows. The cache goes
first over UCX into the other process, then into files that another process reads. Both check every cell.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from dejavu.ids import Epoch, RowId
from dejavu.kv.chunk import decode_message
from dejavu.kv.inbox import KvInbox
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.primitives import (
    Destinations,
    DiskMemory,
    LandedRow,
    Sender,
    StreamSetup,
    read_row,
    stream_in,
    stream_out,
)
from dejavu.kv.route import Holding, RowSpan
from dejavu.kv.staging import StagingRing
from dejavu.transport.base import Hello, Inbound, Link
from dejavu.transport.ucx import UcxTransport

CLUSTER, EPOCH, SECRET, TIMEOUT_S = "example", Epoch(1), "a secret of the cluster", 60.0
LAYOUT = KvLayout(model_hash="made-up", num_layers=12, num_kv_heads=4, head_dim=64, dtype="float32", max_length=256)
LENGTHS = (256, 31, 100, 7, 200, 64)
"""Positions of each row; row ids are 0 to 5."""
PROMPT_BATCH, TOKEN_BATCH = 2, 3
PROMPT_STAGES = (
    Holding(owner="prompt0", layers=LayerRange(0, 7), heads=(0, 4)),
    Holding(owner="prompt1", layers=LayerRange(7, 12), heads=(0, 4)),
)
TOKEN_STAGES = (
    Holding(owner="token0", layers=LayerRange(0, 3), heads=(0, 4)),
    Holding(owner="token1", layers=LayerRange(3, 8), heads=(0, 4)),
    Holding(owner="token2", layers=LayerRange(8, 12), heads=(0, 4)),
)


def made_up_cells(layer: int) -> Tensor:
    """K and V of one layer, all rows: [2, B, H, T, D]. The same in every process."""
    shape = (2, len(LENGTHS), LAYOUT.num_kv_heads, LAYOUT.max_length, LAYOUT.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(layer))


@dataclass(frozen=True, slots=True)
class OneLink:
    """The ``Sender`` of this example: all token stages live in the process at the end of one link."""

    link: Link

    def send(self, owner: str, header: bytes, payload: Sequence[memoryview]) -> Future[None]:
        """Queues the message; a real system would put ``owner`` into an envelope, here the layers tell it."""
        return self.link.send(header, payload, timeout_s=TIMEOUT_S)


def stream_all(sender: Sender) -> str:
    """Every row has left every prompt stage, batch by batch and layer by layer; says what moved."""
    staging = StagingRing(num_buffers=4, buffer_bytes=1 << 20)
    num_messages = num_chunks = num_bytes = 0
    for first in range(0, len(LENGTHS), PROMPT_BATCH):
        batch = range(first, first + PROMPT_BATCH)
        rows = [RowSpan(row_id=RowId(row), length=LENGTHS[row]) for row in batch]
        for stage in PROMPT_STAGES:
            setup = StreamSetup(cluster=CLUSTER, epoch=EPOCH, source=stage, targets=TOKEN_STAGES, layout=LAYOUT)
            for layer in stage.layers.indices:
                keys, values = made_up_cells(layer)[:, batch.start : batch.stop]
                streamed = stream_out(layer, keys, values, rows, setup, staging, sender, timeout_s=TIMEOUT_S)
                for sent in streamed.sends:
                    sent.result(TIMEOUT_S)
                num_messages += len(streamed.sends)
                num_chunks += streamed.num_chunks
                num_bytes += streamed.num_bytes
    return f"{num_messages} messages, {num_chunks} chunks, {num_bytes} bytes"


class TokenSide:
    """The pools of the token stages: one for each stage and microbatch, in which ``take`` puts whole rows."""

    def __init__(self) -> None:
        num_batches = len(LENGTHS) // TOKEN_BATCH
        self._pools = {
            stage.owner: [KvPool(LAYOUT, stage.layers, TOKEN_BATCH) for _ in range(num_batches)]
            for stage in TOKEN_STAGES
        }

    def take(self, stage: Holding, landed: LandedRow) -> None:
        """The row is in its microbatch's pool."""
        batch, place = divmod(landed.row_id, TOKEN_BATCH)
        stream_in(landed, self._pools[stage.owner][batch], place)

    def num_wrong(self) -> int:
        """How many of all layers of all rows are not what was made up."""
        wrong = 0
        for stage in TOKEN_STAGES:
            for layer in stage.layers.indices:
                keys, values = made_up_cells(layer)
                for row, length in enumerate(LENGTHS):
                    pool, place = self._pools[stage.owner][row // TOKEN_BATCH], row % TOKEN_BATCH
                    same_keys = torch.equal(pool.keys(layer)[place, :, :length], keys[row, :, :length])
                    same_values = torch.equal(pool.values(layer)[place, :, :length], values[row, :, :length])
                    wrong += not (same_keys and same_values)
        return wrong


class Arrivals:
    """A transport's handler that lets the main thread wait for messages."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Inbound] = queue.Queue()

    def admit(self, hello: Hello) -> str | None:
        """Refuses a peer whose cache has another shape."""
        return None if hello.fingerprint == LAYOUT.fingerprint else f"my cache is {LAYOUT.fingerprint}"

    def received(self, message: Inbound) -> None:
        """The message waits; the transport's thread goes on."""
        self.messages.put(message)

    def lost(self, hello: Hello, reason: str) -> None:
        """The prompt side has said all that it had to say."""


def receive(pipe: Connection) -> None:
    """The token side's process: address out, rows in, and how many layers of rows are wrong."""
    transport, arrivals, side = UcxTransport(SECRET), Arrivals(), TokenSide()
    inboxes = {stage: KvInbox(cluster=CLUSTER, epoch=EPOCH, layout=LAYOUT, holding=stage) for stage in TOKEN_STAGES}
    for inbox in inboxes.values():
        for row, length in enumerate(LENGTHS):
            inbox.expect(RowId(row), length)
    pipe.send(transport.listen(arrivals))
    num_left = len(inboxes) * len(LENGTHS)
    while num_left:
        inbound = arrivals.messages.get(timeout=TIMEOUT_S)
        message = decode_message(inbound.header)
        stage = next(stage for stage in TOKEN_STAGES if message.chunks[0].layers.start in stage.layers)
        accepted = inboxes[stage].accept(message, inbound.payload)
        inbound.release()
        for row_id in accepted.completed:
            landed = inboxes[stage].take(row_id)
            side.take(stage, landed)
            inboxes[stage].recycle(landed)
            num_left -= 1
    pipe.send(side.num_wrong())
    transport.close()


def read_back(pipe: Connection) -> None:
    """Another process that finds the files of the token stages, and says how many layers of rows are wrong."""
    folder, side = Path(pipe.recv()), TokenSide()
    for stage in TOKEN_STAGES:
        for row, length in enumerate(LENGTHS):
            stored = read_row(folder / stage.owner, RowId(row), cluster=CLUSTER)
            side.take(stage, stored.landed(LAYOUT, stage, length, epoch=EPOCH))
    pipe.send(side.num_wrong())


def over_ucx() -> int:
    """The cache is in the other process; returns how many layers of rows are wrong there."""
    spawn = multiprocessing.get_context("spawn")
    pipe, other_end = spawn.Pipe()
    process = spawn.Process(target=receive, args=(other_end,), daemon=True)
    process.start()
    # Without a copy of its own here, the pipe ends when the other process dies.
    other_end.close()
    hello = Hello(cluster=CLUSTER, name="prompt", incarnation="1", epoch=EPOCH, fingerprint=LAYOUT.fingerprint)
    transport = UcxTransport(SECRET)
    link = transport.connect(pipe.recv(), hello, peer="token", timeout_s=TIMEOUT_S)
    print(f"{link.description}: {stream_all(OneLink(link))}")
    wrong: int = pipe.recv()
    transport.close()
    process.join(TIMEOUT_S)
    return wrong


def over_disk(folder: Path) -> int:
    """The cache is in files, and another process has read it; returns how many layers of rows are wrong there."""
    memories = {stage.owner: DiskMemory(folder / stage.owner) for stage in TOKEN_STAGES}
    regime = memories["token0"].regime
    print(f"disk ({regime}): {stream_all(Destinations(by_owner=memories))}")
    for memory in memories.values():
        memory.close()
    spawn = multiprocessing.get_context("spawn")
    pipe, other_end = spawn.Pipe()
    process = spawn.Process(target=read_back, args=(other_end,), daemon=True)
    process.start()
    # Without a copy of its own here, the pipe ends when the other process dies.
    other_end.close()
    pipe.send(str(folder))
    wrong: int = pipe.recv()
    process.join(TIMEOUT_S)
    return wrong


def main() -> None:
    """Prints what moved; the exit status is 1 when a cell is not what it was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a new folder for the files, kept (default: a temporary one)")
    folder = parser.parse_args().folder
    wrong = over_ucx()
    if folder is None:
        with tempfile.TemporaryDirectory() as name:
            wrong += over_disk(Path(name))
    else:
        wrong += over_disk(folder)
    print("every cell is equal" if wrong == 0 else f"{wrong} layers of rows differ")
    raise SystemExit(wrong != 0)


if __name__ == "__main__":
    main()
