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
from dejavu.kv.pool import KvPool
from dejavu.kv.primitives import StreamSetup, stream_in
from dejavu.kv.route import Holding, RowSpan
from dejavu.kv.staging import StagingRing
from dejavu.kv.streamer import Streamer
from dejavu.kv.writers import StepWriter

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
