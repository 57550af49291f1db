"""The same copies on a CPU and, where there is one, on a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch

from dejavu.ids import Epoch, RowId
from dejavu.kv.chunk import decode_message
from dejavu.kv.device import CpuCopier, CudaCopier, copier_for
from dejavu.kv.inbox import KvInbox
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.levels import StreamingLevel
from dejavu.kv.pool import KvPool
from dejavu.kv.primitives import StreamSetup, stream_in
from dejavu.kv.replica import ReplicaLimits, ReplicaStore
from dejavu.kv.route import Holding, RowSpan
from dejavu.kv.staging import StagingRing
from dejavu.kv.stream_setup import PoolRow
from dejavu.kv.streamer import Streamer
from dejavu.kv.writers import StepWriter

from harness.kv_receivers import Receivers

LAYOUT = KvLayout(model_hash="m", num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", max_length=64)
LAYERS = LayerRange(0, 3)
HOLDING = Holding(owner="w", layers=LAYERS, heads=(0, 2))

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device"),
        ],
    ),
]


class Direct:
    """Gives every message to an inbox at once."""

    def __init__(self, inbox: KvInbox) -> None:
        self.inbox = inbox
        self.completed: list[RowId] = []

    def send(self, owner: str, header: bytes, payload: Sequence[memoryview]) -> Future[None]:
        self.completed += self.inbox.accept(decode_message(header), payload[0]).completed
        done: Future[None] = Future()
        done.set_result(None)
        return done


def test_the_cpus_copier_has_nothing_to_wait_for() -> None:
    copier = copier_for("cpu")
    assert isinstance(copier, CpuCopier)
    assert copier.mark() is None
    with copier.copying(None):
        pass


@pytest.mark.parametrize("device", DEVICES)
def test_layers_computed_on_a_device_land_in_a_pool_of_that_device(device: str) -> None:
    on_gpu = device == "cuda"
    copier = copier_for(device)
    assert isinstance(copier, CudaCopier) == on_gpu
    inbox = KvInbox(cluster="c", epoch=Epoch(1), layout=LAYOUT, holding=HOLDING, pin=on_gpu)
    sender = Direct(inbox)
    errors: list[Exception] = []
    streamer = Streamer(
        StreamSetup(cluster="c", epoch=Epoch(1), source=HOLDING, targets=(HOLDING,), layout=LAYOUT),
        StagingRing(2, 1 << 16, pin=on_gpu, device=device),
        sender,
        on_error=lambda error, _: errors.append(error),
        copier=copier,
    )
    rows = [RowSpan(row_id=RowId(1), length=64), RowSpan(row_id=RowId(2), length=17)]
    for span in rows:
        inbox.expect(span.row_id, span.length)
    layers = []
    for layer in LAYERS.indices:
        # As the models compute: what they hand over are inference tensors.
        with torch.inference_mode():
            made = torch.randn(2, 64, 2, 8, device=device).mul(2).transpose(1, 2)
            layers.append((made, made + 1))
            streamer.submit(layer, *layers[-1], rows)
    streamer.drain(60)
    streamer.close(60)
    assert errors == []
    assert sender.completed == [RowId(1), RowId(2)]
    pool = KvPool(LAYOUT, LAYERS, 2, device=device)
    for index, span in enumerate(rows):
        stream_in(inbox.take(span.row_id), pool, index)
        for layer, (keys, values) in enumerate(layers):
            assert torch.equal(pool.keys(layer)[index, :, : span.length], keys[index, :, : span.length])
            assert torch.equal(pool.values(layer)[index, :, : span.length], values[index, :, : span.length])


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_writes_its_cells_on_the_pools_device(device: str) -> None:
    pool = KvPool(LAYOUT, LAYERS, 2, device=device)
    cells = torch.randn(2, 2, 1, 8, device=device)
    StepWriter(pool, 0, 2, live=[1], positions=[0, 5]).update(1, cells, cells)
    assert torch.equal(pool.keys(1)[1, :, 5], cells[1, :, 0])
    assert not pool.keys(1)[0].any()


class PoolBench:
    """A pool on a device whose rows stream into copies in host memory."""

    def __init__(self, device: str, level: StreamingLevel) -> None:
        self.pool = KvPool(LAYOUT, LAYERS, 2, device=device)
        limits = ReplicaLimits(max_bytes=1 << 20, block_positions=16)
        self.store = ReplicaStore(cluster="c", epoch=Epoch(1), layout=LAYOUT, holding=HOLDING, limits=limits)
        self.receivers = Receivers({"w": self.store})
        self.errors: list[Exception] = []
        self.staging = StagingRing(2, 1 << 14, pin=device == "cuda", device=device)
        self.streamer = Streamer(
            StreamSetup(cluster="c", epoch=Epoch(1), source=HOLDING, targets=(HOLDING,), layout=LAYOUT),
            self.staging,
            self.receivers,
            on_error=lambda error, _: self.errors.append(error),
            level=level,
            copier=copier_for(device),
        )

    def step(self, position: int) -> torch.Tensor:
        """Both rows have a new cell in every layer, and it has been submitted: [L, R, H, D], K; V is one more."""
        made = torch.randn(len(LAYERS), 2, 2, 1, 8, device=self.pool.device)
        writer = StepWriter(self.pool, 0, 2, live=[0, 1], positions=[position, position])
        with torch.inference_mode():
            for layer in LAYERS.indices:
                writer.update(layer, made[layer], made[layer] + 1)
        rows = [
            PoolRow(span=RowSpan(row_id=RowId(1 + index), length=1, start=position), row_index=index)
            for index in range(2)
        ]
        self.streamer.submit_rows(self.pool, rows, made_by="step")
        return made[..., 0, :].cpu()

    def close(self) -> None:
        self.streamer.drain(60)
        self.streamer.close(60)
        assert (self.errors, self.staging.num_out) == ([], 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("level", "num_messages"),
    [(StreamingLevel.naive, 3 * 2 * 3 * 2 * 2), (StreamingLevel.buffered, 3), (StreamingLevel.full, 3)],
    ids=["naive", "buffered", "full"],
)
def test_rows_of_a_pool_on_a_device_land_in_copies_at_every_level(
    device: str, level: StreamingLevel, num_messages: int
) -> None:
    bench = PoolBench(device, level)
    steps = [bench.step(position) for position in range(3)]
    bench.close()
    assert len(bench.receivers.letters) == num_messages
    for index in range(2):
        cells = bench.store.landed(RowId(1 + index), 3).cells_LCHTD
        for position, made in enumerate(steps):
            assert torch.equal(cells[:, 0, :, position], made[:, index])
            assert torch.equal(cells[:, 1, :, position], made[:, index] + 1)


@pytest.mark.parametrize("device", DEVICES)
def test_a_place_on_a_device_that_was_settled_can_be_overwritten_while_its_step_is_on_its_way(device: str) -> None:
    bench = PoolBench(device, StreamingLevel.full)
    bench.receivers.is_open = False
    made = [bench.step(position) for position in range(2)]
    bench.receivers.await_letters(2)
    bench.streamer.settle(frozenset({0, 1}))
    bench.pool.cells_LCRHSD.fill_(-1.0)
    bench.receivers.open()
    bench.close()
    for index in range(2):
        keys = bench.store.landed(RowId(1 + index), 2).cells_LCHTD[:, 0]
        assert torch.equal(keys, torch.stack([step[:, index] for step in made], dim=2))


@pytest.mark.parametrize("device", DEVICES)
def test_a_place_on_a_device_that_is_settled_at_once_gives_its_old_cells_or_none(device: str) -> None:
    bench = PoolBench(device, StreamingLevel.full)
    made = [bench.step(position) for position in range(8)]
    bench.streamer.settle(frozenset({0}))
    bench.pool.cells_LCRHSD[:, :, 0] = -1.0
    bench.close()
    for index, row_id in enumerate((RowId(1), RowId(2))):
        here = bench.store.length(row_id)
        if here:
            keys = bench.store.landed(row_id, here).cells_LCHTD[:, 0]
            assert torch.equal(keys, torch.stack([step[:, index] for step in made[:here]], dim=2))
    assert bench.store.length(RowId(2)) == 8
