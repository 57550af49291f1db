"""A streamer of a small model's stage between a pool and two receivers, for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from dejavu.clock import VirtualClock
from dejavu.ids import Epoch, RowId
from dejavu.kv.device import Copier, CpuCopier
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.levels import StreamingLevel
from dejavu.kv.pool import KvPool
from dejavu.kv.replica import ReplicaLimits, ReplicaStore
from dejavu.kv.route import Holding, RowSpan
from dejavu.kv.staging import StagingRing
from dejavu.kv.stream_account import StreamSpan
from dejavu.kv.stream_setup import PoolRow, StreamSetup
from dejavu.kv.streamer import Streamer

from harness.kv_receivers import Receivers

LAYOUT = KvLayout(model_hash="m", num_layers=3, num_kv_heads=2, head_dim=2, dtype="float32", max_length=8)
LAYERS, HEADS = LayerRange(0, 3), (0, 2)
SOURCE = Holding(owner="w", layers=LAYERS, heads=HEADS)
TARGETS = (
    Holding(owner="t0", layers=LayerRange(0, 2), heads=HEADS),
    Holding(owner="t1", layers=LayerRange(2, 3), heads=HEADS),
)
POSITION_BYTES = LAYOUT.position_bytes * len(LAYERS)


def pool_row(row_id: RowId, row_index: int, length: int, start: int = 0) -> PoolRow:
    """Positions of a row and its place."""
    return PoolRow(span=RowSpan(row_id=row_id, length=length, start=start), row_index=row_index)


def numbered_pool(num_rows: int = 4) -> KvPool:
    """Every element a number of its own, never 0."""
    pool = KvPool(LAYOUT, LAYERS, num_rows)
    pool.cells_LCRHSD.copy_(torch.arange(1, 1 + pool.cells_LCRHSD.numel()).view(pool.cells_LCRHSD.shape))
    return pool


class Beside(CpuCopier):
    """As a CUDA device: even a step is gathered by the streamer's thread."""

    gathers_at_once = False


class StreamerBench:
    """A streamer, its receivers, and what it reported. Time stands still unless the test moves it."""

    def __init__(
        self,
        level: StreamingLevel = StreamingLevel.full,
        *,
        num_buffers: int = 4,
        max_queued_jobs: int = 4,
        retain_bytes: int = 0,
        timeout_s: float = 30.0,
        patience_s: float | None = None,
        copier: Copier | None = None,
    ) -> None:
        self.receivers = Receivers({target.owner: _store(target) for target in TARGETS})
        self.staging = StagingRing(num_buffers, 4096)
        self.clock = VirtualClock()
        self.errors: list[tuple[Exception, tuple[RowId, ...]]] = []
        self.on_lost: Callable[[tuple[RowId, ...]], None] = lambda row_ids: None
        self.spans: list[StreamSpan] = []
        self.pool = numbered_pool()
        self._threads_before = set(threading.enumerate())
        self.streamer = Streamer(
            StreamSetup(cluster="c", epoch=Epoch(1), source=SOURCE, targets=TARGETS, layout=LAYOUT),
            self.staging,
            self.receivers,
            on_error=self._failed,
            on_span=self.spans.append,
            level=level,
            copier=copier or Beside(),
            clock=self.clock,
            max_queued_jobs=max_queued_jobs,
            retain_bytes=retain_bytes,
            timeout_s=timeout_s,
            patience_s=patience_s,
        )

    def step(self, *rows: PoolRow) -> None:
        """One job of the pool's rows."""
        self.streamer.submit_rows(self.pool, rows, made_by="step")

    def prompt_layers(self, *rows: PoolRow) -> None:
        """The rows' prompts as the models make them: tensors of each layer, heads a view, with the pool's cells."""
        length = max(row.span.length for row in rows)
        places = [row.row_index for row in rows]
        for layer in LAYERS.indices:
            keys, values = (
                cells[places, :, :length].transpose(1, 2).contiguous().transpose(1, 2)
                for cells in (self.pool.keys(layer), self.pool.values(layer))
            )
            self.streamer.submit(layer, keys, values, [row.span for row in rows])

    def received(self, row_id: RowId, length: int) -> torch.Tensor:
        """The row's cells [L, C, H, T, D] from all receivers."""
        stores = self.receivers.stores
        return torch.cat([stores[target.owner].landed(row_id, length).cells_LCHTD for target in TARGETS])

    def sent(self, row_index: int, length: int) -> torch.Tensor:
        """What the pool holds of a row: [L, C, H, T, D]."""
        return self.pool.cells(row_index, LAYERS, HEADS, (0, length))

    def _failed(self, error: Exception, row_ids: tuple[RowId, ...]) -> None:
        self.errors.append((error, row_ids))
        self.on_lost(row_ids)

    def close(self) -> None:
        """Nothing of the streamer is left. Raises AssertionError when a staging buffer is."""
        self.receivers.open()
        self.streamer.drain(30)
        self.streamer.close(30)
        assert self.staging.num_out == 0
        assert set(threading.enumerate()) <= self._threads_before


@contextmanager
def beside(act: Callable[[], None]) -> Iterator[threading.Thread]:
    """``act`` runs on a thread of its own, which has ended behind the block."""
    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(30)
        assert not thread.is_alive()


def log_of(bench: StreamerBench, act: Callable[[], None], num_letters: int) -> Sequence[str]:
    """What came first, while ``act`` runs beside a network that answers each message only after it was sent."""
    bench.receivers.is_open = False
    log: list[str] = []

    def compute() -> None:
        act()
        log.append("computing goes on")

    with beside(compute):
        for index in range(num_letters):
            bench.receivers.await_letters(1)
            log.append("answered")
            bench.receivers.futures[index].set_result(None)
    bench.receivers.is_open = True
    return log


def _store(holding: Holding) -> ReplicaStore:
    return ReplicaStore(
        cluster="c",
        epoch=Epoch(1),
        layout=LAYOUT,
        holding=holding,
        limits=ReplicaLimits(max_bytes=1 << 20, block_positions=4),
    )
