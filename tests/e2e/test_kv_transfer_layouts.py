"""A cache whose values say where they belong crosses UCX into another process and is read back (field report B06)."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection

import pytest
import torch

from dejavu.ids import Epoch, RowId
from dejavu.kv.chunk import decode_message
from dejavu.kv.inbox import KvInbox
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.pool import TORCH_DTYPES, KvPool
from dejavu.kv.primitives import StreamSetup, stream_in, stream_out
from dejavu.kv.route import Holding, RowSpan
from dejavu.kv.staging import StagingRing
from dejavu.transport.base import Hello, Inbound, Link
from dejavu.transport.ucx import UcxTransport

pytestmark = pytest.mark.slow
CLUSTER, EPOCH, SECRET, WAIT_S = "c", Epoch(1), "a secret of these tests", 60.0
NUM_LAYERS, HEAD_DIM, MAX_LENGTH = 7, 24, 37
LENGTHS = (37, 1, 16, 5)
"""Positions of each row; row ids are 0 to 3."""
PROMPT_BATCH = 2


def made_up_cells(layout: KvLayout) -> torch.Tensor:
    """Every cell tells (layer, K or V, head, position, dim), and its row: [L, (K, V), B, H, T, D].

    Of a row no value comes twice. Two-byte types count in bit patterns, because their numbers are too coarse.
    """
    num_rows = len(LENGTHS)
    shape = (NUM_LAYERS, 2, layout.num_kv_heads, MAX_LENGTH, HEAD_DIM)
    places = torch.arange(torch.Size(shape).numel()).view(shape)
    numbers = torch.stack([places + row * 13_007 for row in range(num_rows)], dim=2)
    if layout.dtype == "float32":
        return numbers.to(torch.float32)
    return numbers.remainder(1 << 16).to(torch.uint16).view(TORCH_DTYPES[layout.dtype])


def as_numbers(cells: torch.Tensor) -> torch.Tensor:
    """Bit patterns, which are equal only where every bit is (a NaN equals nothing)."""
    return cells.contiguous().view(torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is to be moved, from where to where."""

    layout: KvLayout
    sources: tuple[Holding, ...]
    targets: tuple[Holding, ...]


def holdings(side: str, cuts: Sequence[int], heads: Sequence[tuple[int, int]]) -> tuple[Holding, ...]:
    """A stage for each pair of neighbouring cuts and each head range."""
    ranges = [LayerRange(start, stop) for start, stop in itertools.pairwise(cuts)]
    return tuple(
        Holding(owner=f"{side}{index}", layers=layers, heads=span)
        for index, (layers, span) in enumerate(itertools.product(ranges, heads))
    )


def case(
    num_kv_heads: int,
    dtype: str,
    *,
    source_cuts: Sequence[int],
    target_cuts: Sequence[int],
    source_heads: Sequence[tuple[int, int]] | None = None,
    target_heads: Sequence[tuple[int, int]] | None = None,
) -> Case:
    whole = [(0, num_kv_heads)]
    return Case(
        layout=KvLayout(
            model_hash="made-up",
            num_layers=NUM_LAYERS,
            num_kv_heads=num_kv_heads,
            head_dim=HEAD_DIM,
            dtype=dtype,
            max_length=MAX_LENGTH,
        ),
        sources=holdings("p", source_cuts, source_heads or whole),
        targets=holdings("t", target_cuts, target_heads or whole),
    )


class Arrivals:
    """A handler that lets the main thread wait for messages."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Inbound] = queue.Queue()

    def admit(self, hello: Hello) -> str | None:
        return None

    def received(self, message: Inbound) -> None:
        self.messages.put(message)

    def lost(self, hello: Hello, reason: str) -> None:
        self.messages.put(Inbound(hello=hello, header=b"", payload=memoryview(b""), release=lambda: None))


def receive(pipe: Connection) -> None:
    """The other process: takes cases until it is told None, and answers each with its pools' bytes by owner."""
    torch.set_num_threads(1)
    transport, arrivals = UcxTransport(SECRET), Arrivals()
    pipe.send(transport.listen(arrivals))
    while (asked := pipe.recv()) is not None:
        pipe.send(landed_bytes(asked, arrivals))
    transport.close()


def landed_bytes(asked: Case, arrivals: Arrivals) -> dict[str, bytes]:
    """Every row has landed at every target and been put into its pool, whose valid cells are returned."""
    layout = asked.layout
    inboxes = {
        target.owner: KvInbox(cluster=CLUSTER, epoch=EPOCH, layout=layout, holding=target) for target in asked.targets
    }
    pools = {target.owner: KvPool(layout, target.layers, len(LENGTHS), heads=target.heads) for target in asked.targets}
    for inbox, (row, length) in itertools.product(inboxes.values(), enumerate(LENGTHS)):
        inbox.expect(RowId(row), length)
    num_left = len(inboxes) * len(LENGTHS)
    while num_left:
        inbound = arrivals.messages.get(timeout=WAIT_S)
        owner, _, header = inbound.header.partition(b"\n")
        inbox, pool = inboxes[owner.decode()], pools[owner.decode()]
        completed = inbox.accept(decode_message(header), inbound.payload).completed
        inbound.release()
        for row_id in completed:
            landed = inbox.take(row_id)
            stream_in(landed, pool, len(LENGTHS) - 1 - row_id)
            inbox.recycle(landed)
        num_left -= len(completed)
    return {owner: pool.cells_LCRHSD.contiguous().view(torch.uint8).numpy().tobytes() for owner, pool in pools.items()}


@dataclass(frozen=True, slots=True)
class Enveloped:
    """The ``Sender`` of these tests: all targets live at the end of one link, so the owner travels in the header."""

    link: Link

    def send(self, owner: str, header: bytes, payload: Sequence[memoryview]) -> Future[None]:
        return self.link.send(owner.encode() + b"\n" + header, payload, timeout_s=WAIT_S)


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """The receiving process and the way to it."""

    pipe: Connection
    link: Link

    def move(self, wanted: Case, cells_LCBHTD: torch.Tensor) -> dict[str, bytes]:
        """The cells have been streamed there, layer by layer and batch by batch; what its pools hold now."""
        self.pipe.send(wanted)
        staging = StagingRing(2, 40_000)
        for source in wanted.sources:
            setup = StreamSetup(
                cluster=CLUSTER, epoch=EPOCH, source=source, targets=wanted.targets, layout=wanted.layout
            )
            for layer, first in itertools.product(source.layers.indices, range(0, len(LENGTHS), PROMPT_BATCH)):
                batch = range(first, first + PROMPT_BATCH)
                keys, values = cells_LCBHTD[layer, :, first : batch.stop, slice(*source.heads)]
                rows = [RowSpan(row_id=RowId(row), length=LENGTHS[row]) for row in batch]
                stream_out(layer, keys, values, rows, setup, staging, Enveloped(self.link), timeout_s=WAIT_S)
        assert self.pipe.poll(WAIT_S)
        pools: dict[str, bytes] = self.pipe.recv()
        assert staging.num_out == 0
        return pools


@pytest.fixture(scope="module")
def other_process() -> Iterator[OtherProcess]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    with contextlib.closing(UcxTransport(SECRET)) as transport:
        address: str = ours.recv()
        hello = Hello(cluster=CLUSTER, name="p", incarnation="1", epoch=EPOCH)
        yield OtherProcess(ours, transport.connect(address, hello, peer="t", timeout_s=WAIT_S))
    ours.send(None)
    process.join(WAIT_S)
    assert process.exitcode == 0


CASES = {
    **{
        f"4-query-heads-{num_kv_heads}-kv-{dtype}": case(
            num_kv_heads, dtype, source_cuts=(0, 3, 7), target_cuts=(0, 2, 4, 7)
        )
        for num_kv_heads, dtype in itertools.product((4, 2, 1), ("float32", "bfloat16"))
    },
    "float16-deep-to-shallow": case(2, "float16", source_cuts=(0, 1, 4, 6, 7), target_cuts=(0, 7)),
    "heads-split-at-the-target": case(
        4, "float32", source_cuts=(0, 7), target_cuts=(0, 4, 7), target_heads=[(0, 1), (1, 4)]
    ),
    "heads-split-differently": case(
        4,
        "bfloat16",
        source_cuts=(0, 5, 7),
        target_cuts=(0, 2, 7),
        source_heads=[(0, 2), (2, 4)],
        target_heads=[(0, 3), (3, 4)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_cell_that_crosses_ucx_is_read_back_in_its_own_place(other_process: OtherProcess, name: str) -> None:
    wanted = CASES[name]
    cells = made_up_cells(wanted.layout)
    pools = other_process.move(wanted, cells)
    assert sorted(pools) == sorted(target.owner for target in wanted.targets)
    for target in wanted.targets:
        layers = slice(target.layers.start, target.layers.stop)
        # The receiving side keeps its rows in the opposite order, so that places differ on both sides.
        expected = cells[layers, :, :, slice(*target.heads)].flip(2)
        for index, length in enumerate(reversed(LENGTHS)):
            expected[:, :, index, :, length:] = 0
        assert pools[target.owner] == as_numbers(expected).numpy().tobytes(), target.owner
