"""Levels 1 and 2 alone, and what level 3 sends."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch

from dejavu.errors import ConfigError
from dejavu.ids import Epoch, RowId
from dejavu.kv.chunk import ChunkCorrupt, decode_message, seal, verify
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.primitives import (
    Destinations,
    LandedRow,
    LocalMemory,
    Region,
    RemoteMemory,
    StreamSetup,
    fetch,
    flush,
    flush_staged,
    gather,
    pool_region,
    scatter,
    stream_in,
    stream_out,
)
from dejavu.kv.route import Holding, RowSpan
from dejavu.kv.staging import StagingRing, StagingTimeout

LAYOUT = KvLayout(model_hash="m", num_layers=4, num_kv_heads=2, head_dim=3, dtype="float32", max_length=8)
LAYERS = LayerRange(1, 4)


class Post:
    """Records messages; its futures resolve when the test says so."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes, bytes]] = []
        self.futures: list[Future[None]] = []
        self.error: Exception | None = None

    def send(self, owner: str, header: bytes, payload: Sequence[memoryview]) -> Future[None]:
        if self.error is not None:
            raise self.error
        self.sent.append((owner, header, b"".join(payload)))
        self.futures.append(Future())
        return self.futures[-1]


def holding(owner: str, start: int, stop: int) -> Holding:
    return Holding(owner=owner, layers=LayerRange(start, stop), heads=(0, 2))


def setup(*targets: Holding) -> StreamSetup:
    return StreamSetup(
        cluster="c", epoch=Epoch(1), source=holding("p", 0, 4), targets=targets or (holding("t", 0, 4),), layout=LAYOUT
    )


def filled_pool() -> KvPool:
    pool = KvPool(LAYOUT, LAYERS, 2)
    pool.cells_LCRHSD.copy_(torch.arange(pool.cells_LCRHSD.numel()).view(pool.cells_LCRHSD.shape))
    return pool


def test_flush_to_local_memory_has_copied_when_it_returns() -> None:
    into = torch.zeros(8, dtype=torch.uint8)
    assert flush(b"", memoryview(b"abcd"), LocalMemory(into=into)).done()
    assert into.tolist() == [97, 98, 99, 100, 0, 0, 0, 0]


def test_flush_to_a_peer_sends_one_message() -> None:
    post = Post()
    flush(b"header", memoryview(b"abcd"), RemoteMemory(owner="t0", sender=post))
    assert post.sent == [("t0", b"header", b"abcd")]


def test_owners_of_this_process_get_their_messages_whole() -> None:
    first, second = torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    sender = Destinations(by_owner={"t0": LocalMemory(into=first), "t1": LocalMemory(into=second)})
    assert sender.send("t1", b"", (memoryview(b"ab"), memoryview(b"cd"))).done()
    assert sender.send("t0", b"", (memoryview(b"wxyz"),)).done()
    assert (bytes(first.tolist()), bytes(second.tolist())) == (b"wxyz", b"abcd")


def test_what_is_gathered_into_lent_memory_is_flushed_without_a_copy_and_can_be_fetched() -> None:
    pool = filled_pool()
    region = pool_region(pool, 1, RowId(5), layers=LayerRange(1, 3), heads=(0, 2), positions=(2, 7))
    place = LocalMemory(into=torch.zeros(region.nbytes + 10, dtype=torch.uint8))
    (staged,) = scatter([region], place.lend(), cluster="c", epoch=Epoch(1), dtype="float32")
    before = place.into.clone()
    flush_staged(staged, "c", Epoch(1), place).result(0)
    assert torch.equal(place.into, before)
    fetched = torch.zeros(region.nbytes, dtype=torch.uint8)
    fetch(staged.chunks[0], place.into[: region.nbytes].numpy().data, fetched)
    assert torch.equal(fetched.view(torch.float32), region.parts[0].reshape(-1))


def test_regions_that_are_larger_than_lent_memory_are_refused_rather_than_overwritten() -> None:
    region = pool_region(filled_pool(), 0, RowId(5), layers=LAYERS, heads=(0, 2), positions=(0, 8))
    place = LocalMemory(into=torch.zeros(region.nbytes // 2, dtype=torch.uint8))
    messages = scatter([region], place.lend(), cluster="c", epoch=Epoch(1), dtype="float32")
    flush_staged(next(messages), "c", Epoch(1), place).result(0)
    with pytest.raises(ValueError, match="lent memory are full"):
        next(messages)


def test_a_large_region_is_one_message_of_several_chunks_that_verify() -> None:
    num_positions = 3 * 1024 * 1024 // (2 * 64 * 4)
    cells = torch.arange(2 * 2 * num_positions * 64, dtype=torch.float32).view(1, 2, 2, num_positions, 64)
    region = Region(
        row_id=RowId(1), layers=LayerRange(0, 1), heads=(0, 2), positions=(10, 10 + num_positions), parts=(cells,)
    )
    (staged,) = scatter([region], StagingRing(1, region.nbytes), cluster="c", epoch=Epoch(1), dtype="float32")
    assert len(staged.chunks) == 2
    target, offset = torch.zeros_like(cells), 0
    for chunk in staged.chunks:
        payload = staged.payload[offset : offset + chunk.num_bytes]
        verify(chunk, payload)
        gather(chunk, payload, target, first=(0, 0, 10))
        offset += chunk.num_bytes
    assert torch.equal(target, cells)


def test_local_memory_that_is_too_small_or_not_contiguous_is_refused() -> None:
    for into in (torch.zeros(3, dtype=torch.uint8), torch.zeros(8, 2, dtype=torch.uint8)[:, 0], torch.zeros(4)):
        with pytest.raises(ValueError, match="4 bytes need a contiguous uint8 tensor"):
            flush(b"", memoryview(b"abcd"), LocalMemory(into=into))


def test_fetch_copies_verified_bytes_and_leaves_the_target_when_they_are_bad() -> None:
    header = seal(
        epoch=Epoch(1),
        row_id=RowId(1),
        layers=LAYERS,
        heads=(0, 1),
        positions=(0, 1),
        dtype="float32",
        payload=memoryview(b"abcd"),
    )
    into = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(ChunkCorrupt):
        fetch(header, memoryview(b"abce"), into)
    assert not into.any()
    fetch(header, memoryview(b"abcd"), into)
    assert bytes(into.tolist()) == b"abcd"


def test_scatter_and_gather_move_a_region_of_one_pool_to_another() -> None:
    source, target, staging = filled_pool(), KvPool(LAYOUT, LAYERS, 3), StagingRing(1, 1 << 16)
    region = pool_region(source, 1, RowId(4), layers=LayerRange(2, 4), heads=(1, 2), positions=(3, 7))
    (staged,) = scatter([region], staging, cluster="c", epoch=Epoch(1), dtype="float32")
    (header,) = staged.chunks
    cells = target.cells(2, LAYERS, (0, 2), (0, 8))
    gather(header, staged.payload, cells, first=(1, 0, 0))
    wanted = torch.zeros_like(cells)
    wanted[1:, :, 1:, 3:7] = source.cells_LCRHSD[1:, :, 1, 1:, 3:7]
    assert torch.equal(cells, wanted)
    staged.buffer.release()


def test_gather_refuses_cells_outside_its_target() -> None:
    staging = StagingRing(1, 1 << 16)
    region = pool_region(filled_pool(), 0, RowId(4), layers=LAYERS, heads=(0, 2), positions=(3, 7))
    (staged,) = scatter([region], staging, cluster="c", epoch=Epoch(1), dtype="float32")
    for first in ((2, 0, 0), (1, 1, 0), (1, 0, 4)):
        with pytest.raises(IndexError, match="lie outside the target's"):
            gather(staged.chunks[0], staged.payload, torch.zeros(3, 2, 2, 7, 3), first=first)


def test_a_region_outside_the_pool_is_refused() -> None:
    pool = filled_pool()
    for row_index, layers, positions in ((2, LAYERS, (0, 1)), (0, LayerRange(0, 2), (0, 1)), (0, LAYERS, (7, 9))):
        with pytest.raises(IndexError):
            pool_region(pool, row_index, RowId(1), layers=layers, heads=(0, 2), positions=positions)


def test_a_region_larger_than_a_buffer_is_cut_by_positions() -> None:
    position_bytes = 3 * 2 * 2 * 3 * 4
    staging = StagingRing(4, 3 * position_bytes)
    region = pool_region(filled_pool(), 0, RowId(4), layers=LAYERS, heads=(0, 2), positions=(0, 8))
    messages = list(scatter([region], staging, cluster="c", epoch=Epoch(1), dtype="float32"))
    assert [chunk.positions for staged in messages for chunk in staged.chunks] == [(0, 3), (3, 6), (6, 8)]


def test_a_buffer_that_cannot_hold_one_position_is_refused_with_both_sizes() -> None:
    region = pool_region(filled_pool(), 0, RowId(4), layers=LAYERS, heads=(0, 2), positions=(0, 8))
    with pytest.raises(ConfigError, match="takes 144 bytes, a staging buffer 100"):
        list(scatter([region], StagingRing(1, 100), cluster="c", epoch=Epoch(1), dtype="float32"))


def test_one_layer_of_many_rows_travels_to_an_owner_as_one_message() -> None:
    post, staging = Post(), StagingRing(1, 1 << 16)
    rows = [RowSpan(row_id=RowId(index), length=index + 1) for index in range(5)]
    cells = torch.randn(5, 2, 5, 3)
    streamed = stream_out(2, cells, cells, rows, setup(holding("t0", 0, 2), holding("t1", 2, 4)), staging, post)
    ((owner, header, payload),) = post.sent
    assert owner == "t1"
    assert [chunk.positions for chunk in decode_message(header).chunks] == [(0, index + 1) for index in range(5)]
    assert streamed.num_bytes == len(payload) == 15 * 2 * 2 * 3 * 4
    assert streamed.num_chunks == 5


def test_a_staging_buffer_comes_back_when_its_send_resolves_or_fails() -> None:
    post, staging = Post(), StagingRing(1, 1 << 16)
    cells, row = torch.randn(1, 2, 4, 3), [RowSpan(row_id=RowId(1), length=4)]
    stream_out(0, cells, cells, row, setup(), staging, post)
    assert staging.num_out == 1
    with pytest.raises(StagingTimeout):
        stream_out(1, cells, cells, row, setup(), staging, post, timeout_s=0)
    post.futures[0].set_result(None)
    stream_out(1, cells, cells, row, setup(), staging, post, timeout_s=0)
    post.futures[1].set_exception(OSError("gone"))
    assert staging.num_out == 0


def test_a_sender_that_refuses_leaves_no_staging_buffer_out() -> None:
    post, staging = Post(), StagingRing(1, 1 << 16)
    post.error = OSError("the link is dead")
    cells = torch.randn(1, 2, 4, 3)
    with pytest.raises(OSError, match="the link is dead"):
        stream_out(0, cells, cells, [RowSpan(row_id=RowId(1), length=4)], setup(), staging, post)
    assert staging.num_out == 0


def test_tensors_of_another_setup_are_refused_with_both_shapes() -> None:
    post, staging, row = Post(), StagingRing(1, 1 << 16), [RowSpan(row_id=RowId(1), length=4)]
    good = torch.randn(1, 2, 4, 3)
    for keys in (torch.randn(2, 2, 4, 3), torch.randn(1, 1, 4, 3), torch.randn(1, 2, 3, 3), good.to(torch.bfloat16)):
        with pytest.raises(ValueError, match="1 rows of up to 4 positions, 2 heads of 3"):
            stream_out(0, keys, good, row, setup(), staging, post)
    with pytest.raises(ValueError, match="layer 4 is not one of p's"):
        stream_out(4, good, good, row, setup(), staging, post)
    assert post.sent == []


def test_a_row_that_is_not_whole_for_the_pool_is_refused() -> None:
    landed = LandedRow(
        row_id=RowId(1),
        length=2,
        layers=LayerRange(1, 3),
        heads=(0, 2),
        cells_LCHTD=torch.zeros(2, 2, 2, 2, 3),
        memory=torch.zeros(0, dtype=torch.uint8),
    )
    with pytest.raises(ValueError, match="row 1 landed as"):
        stream_in(landed, KvPool(LAYOUT, LAYERS, 1), 0)


def test_a_steps_cells_are_sent_under_each_rows_own_position() -> None:
    post, staging = Post(), StagingRing(1, 1 << 16)
    rows = [RowSpan(row_id=RowId(1), length=1, start=5), RowSpan(row_id=RowId(2), length=1, start=2)]
    keys, values = torch.randn(2, 2, 1, 3), torch.randn(2, 2, 1, 3)
    stream_out(1, keys, values, rows, setup(), staging, post)
    ((_, header, payload),) = post.sent
    chunks = decode_message(header).chunks
    assert [(chunk.row_id, chunk.positions) for chunk in chunks] == [(1, (5, 6)), (2, (2, 3))]
    landed = torch.frombuffer(bytearray(payload), dtype=torch.float32).view(2, 2, 2, 1, 3)
    assert torch.equal(landed, torch.stack((keys, values), dim=1))
