"""Growing copies of rows: blocks, order, kinds, what is refused, and memory that is used again."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import msgspec
import pytest
import torch

from dejavu.errors import InvalidTransition
from dejavu.ids import Epoch, RowId
from dejavu.kv.box import BOTH, Span
from dejavu.kv.chunk import KvMessage, seal
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.replica import ReplicaLimits, ReplicaStore
from dejavu.kv.route import Holding

LAYOUT = KvLayout(model_hash="m", num_layers=6, num_kv_heads=3, head_dim=2, dtype="float32", max_length=40)
LAYERS = LayerRange(2, 5)
HEADS = (1, 3)
BLOCK = 4
POSITION_BYTES = 3 * 2 * 2 * 2 * 4
BLOCK_BYTES = BLOCK * POSITION_BYTES
A, B, C = RowId(1), RowId(2), RowId(3)

Letter = tuple[KvMessage, memoryview]


def new_store(*, max_blocks: int = 20, free_blocks: int = 4) -> ReplicaStore:
    limits = ReplicaLimits(
        max_bytes=max_blocks * BLOCK_BYTES, block_positions=BLOCK, free_bytes=free_blocks * BLOCK_BYTES
    )
    holding = Holding(owner="m", layers=LAYERS, heads=HEADS)
    return ReplicaStore(cluster="c", epoch=Epoch(3), layout=LAYOUT, holding=holding, limits=limits)


def row(row_id: RowId = A, length: int = 40) -> torch.Tensor:
    """[L, C, H, T, D] of the holding, each element a number of its own, never 0."""
    shape = (len(LAYERS), 2, HEADS[1] - HEADS[0], 40, LAYOUT.head_dim)
    return (torch.arange(shape[0] * 2 * 2 * 40 * 2).view(shape) + 1 + 10_000 * row_id).float()[..., :length, :]


def letter(
    positions: Span,
    row_id: RowId = A,
    *,
    layers: LayerRange = LAYERS,
    heads: Span = HEADS,
    kinds: Span = BOTH,
    **other: object,
) -> Letter:
    """A message of one chunk of ``row``; ``other`` is sealed in place of what the store wants."""
    within = slice(layers.start - LAYERS.start, layers.stop - LAYERS.start)
    cells = row(row_id)[within, slice(*kinds), heads[0] - HEADS[0] : heads[1] - HEADS[0], slice(*positions)]
    payload = memoryview(bytearray(cells.contiguous().view(torch.uint8).reshape(-1).numpy().tobytes()))
    fields: dict[str, object] = {"epoch": Epoch(3), "dtype": "float32", "layers": layers, "heads": heads}
    header = seal(row_id=row_id, positions=positions, kinds=kinds, payload=payload, **{**fields, **other})  # type: ignore[arg-type]
    return KvMessage(cluster="c", epoch=Epoch(3), chunks=(header,)), payload


def together(letters: Sequence[Letter]) -> Letter:
    """One message of the chunks of several."""
    chunks = tuple(chunk for message, _ in letters for chunk in message.chunks)
    payload = memoryview(bytearray(b"".join(payload for _, payload in letters)))
    return KvMessage(cluster="c", epoch=Epoch(3), chunks=chunks), payload


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_row_grows_by_blocks_and_holds_what_was_put(length: int, at_once: bool) -> None:
    store = new_store()
    spans = [(0, length)] if at_once else [(position, position + 1) for position in range(length)]
    for span in spans:
        store.accept(*letter(span))
        assert store.length(A) == span[1]
        assert store.nbytes == -(-span[1] // BLOCK) * BLOCK_BYTES
    landed = store.landed(A, length)
    assert torch.equal(landed.cells_LCHTD, row(length=length))
    assert (landed.row_id, landed.length, landed.layers, landed.heads) == (A, length, LAYERS, HEADS)


def test_a_row_that_never_came_has_no_length_and_cannot_be_landed() -> None:
    store = new_store()
    assert (store.length(A), store.row_ids, store.nbytes) == (0, (), 0)
    with pytest.raises(InvalidTransition, match=r"row 1: positions \[0, 1\) were asked for, \[0, 0\) are here"):
        store.landed(A, 1)


def test_landed_gives_any_part_from_the_start_and_refuses_more_than_is_here() -> None:
    store = new_store()
    store.accept(*letter((0, 6)))
    for length in range(1, 7):
        assert torch.equal(store.landed(A, length).cells_LCHTD, row(length=length))
    for length in (0, 7):
        with pytest.raises(InvalidTransition, match=r"\[0, 6\) are here"):
            store.landed(A, length)


def test_a_landed_row_is_a_copy_that_later_chunks_and_a_release_do_not_change() -> None:
    store = new_store()
    store.accept(*letter((0, 2)))
    landed = store.landed(A, 2)
    store.release(A)
    store.accept(*letter((0, 4), B))
    assert torch.equal(landed.cells_LCHTD, row(length=2))


def test_length_counts_only_from_the_start_without_gaps() -> None:
    store = new_store()
    for span, length in (((8, 11), 0), ((1, 3), 0), ((0, 1), 3), ((4, 8), 3), ((3, 4), 11)):
        store.accept(*letter(span))
        assert store.length(A) == length
    assert torch.equal(store.landed(A, 11).cells_LCHTD, row(length=11))


def test_a_position_counts_when_its_last_layer_kind_and_head_are_here() -> None:
    store = new_store()
    ranges = (LayerRange(2, 4), LayerRange(4, 5))
    boxes = list(itertools.product(ranges, [(0, 1), (1, 2)], [(1, 2), (2, 3)]))
    for layers, kinds, heads in boxes:
        assert store.length(A) == 0
        store.accept(*letter((0, 5), layers=layers, kinds=kinds, heads=heads))
    assert store.length(A) == 5
    assert torch.equal(store.landed(A, 5).cells_LCHTD, row(length=5))
    assert store.counters.accepted == len(boxes) == 8


def test_chunks_that_overlap_or_come_twice_do_no_harm_and_pure_repeats_are_counted() -> None:
    store = new_store()
    for span in ((2, 7), (0, 5), (2, 7), (3, 4)):
        store.accept(*letter(span))
    assert torch.equal(store.landed(A, 7).cells_LCHTD, row(length=7))
    assert (store.counters.accepted, store.counters.duplicate) == (2, 2)


def test_a_step_of_several_rows_lands_in_each_from_one_message() -> None:
    store = new_store()
    store.accept(*together([letter((0, 4), A), letter((0, 2), B)]))
    store.accept(*together([letter((4, 5), A), letter((2, 3), B)]))
    assert torch.equal(store.landed(A, 5).cells_LCHTD, row(A, 5))
    assert torch.equal(store.landed(B, 3).cells_LCHTD, row(B, 3))
    assert store.row_ids == (A, B)


def test_the_payload_may_be_overwritten_after_accept() -> None:
    store = new_store()
    message, payload = letter((0, 6))
    store.accept(message, payload)
    payload[:] = bytes(len(payload))
    assert torch.equal(store.landed(A, 6).cells_LCHTD, row(length=6))


@pytest.mark.parametrize(
    "other",
    [
        {"layers": LayerRange(1, 4)},
        {"heads": (0, 2)},
        {"dtype": "bfloat16"},
        {"positions": (39, 41)},
        {"kinds": (0, 1)},
        {"kinds": (1, 3)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_genuine_chunk_that_does_not_fit_is_reported_and_does_not_land(other: dict[str, object]) -> None:
    store = new_store()
    _, payload = letter((0, 2))
    fields = {"epoch": Epoch(3), "layers": LAYERS, "heads": HEADS, "positions": (0, 2), "dtype": "float32"}
    header = seal(row_id=A, payload=payload, **{**fields, **other})  # type: ignore[arg-type]
    answer = store.accept(KvMessage(cluster="c", epoch=Epoch(3), chunks=(header,)), payload)
    assert (answer.corrupt, answer.corrupt_chunks) == ((A,), (header,))
    assert (store.counters.corrupt, store.counters.bytes_landed, store.nbytes) == (1, 0, 0)


def test_a_corrupt_chunk_is_reported_and_the_others_of_its_message_land() -> None:
    store = new_store()
    message, payload = together([letter((0, 1), one) for one in (A, B, C)])
    payload[POSITION_BYTES + 5] ^= 1
    answer = store.accept(message, payload)
    assert (answer.corrupt, answer.corrupt_chunks) == ((B,), (message.chunks[1],))
    assert [store.length(one) for one in (A, B, C)] == [1, 0, 1]
    assert store.counters.corrupt == 1
    store.accept(*letter((0, 1), B))
    assert torch.equal(store.landed(B, 1).cells_LCHTD, row(B, 1))


def test_a_message_whose_payload_was_cut_reports_every_chunk() -> None:
    store = new_store()
    message, payload = together([letter((0, 1), A), letter((0, 1), B)])
    assert store.accept(message, payload[:-1]).corrupt == (A, B)
    assert store.row_ids == ()


def test_another_cluster_another_epoch_and_an_ended_row_are_stale() -> None:
    store = new_store()
    message, payload = letter((0, 1))
    assert store.accept(msgspec.structs.replace(message, cluster="other"), payload).dropped == 1
    assert store.accept(*letter((0, 1), epoch=Epoch(2))).dropped == 1
    store.release(A)
    assert store.accept(*letter((0, 1))).dropped == 1
    assert (store.counters.stale, store.counters.bytes_landed, store.row_ids) == (3, 0, ())


def test_a_row_that_was_released_has_ended_even_if_it_never_came() -> None:
    store = new_store()
    assert not store.has_ended(A)
    store.release(A)
    store.release(A)
    assert store.has_ended(A)
    assert not store.has_ended(B)


def test_beyond_the_byte_limit_chunks_are_refused_and_counted_and_other_rows_go_on() -> None:
    store = new_store(max_blocks=3)
    store.accept(*letter((0, 5), A))
    store.accept(*letter((0, 1), B))
    assert store.accept(*letter((0, 1), C)).dropped == 1
    assert store.accept(*letter((5, 9), A)).dropped == 1
    assert store.counters.refused == 2
    assert store.nbytes == 3 * BLOCK_BYTES
    store.accept(*letter((5, 8), A))
    store.accept(*letter((1, 4), B))
    assert torch.equal(store.landed(A, 8).cells_LCHTD, row(A, 8))
    assert torch.equal(store.landed(B, 4).cells_LCHTD, row(B, 4))
    store.release(A)
    store.accept(*letter((0, 1), C))
    assert torch.equal(store.landed(C, 1).cells_LCHTD, row(C, 1))


def test_a_row_whose_only_chunk_was_refused_is_not_here() -> None:
    store = new_store(max_blocks=1)
    store.accept(*letter((0, BLOCK + 1), A))
    assert store.row_ids == ()


def test_memory_of_a_released_row_is_used_again_and_shows_no_old_cells() -> None:
    store = new_store()
    store.accept(*letter((0, 8), A))
    store.release(A)
    assert (store.length(A), store.row_ids, store.nbytes) == (0, (), 2 * BLOCK_BYTES)
    store.accept(*letter((1, 2), B))
    assert (store.length(B), store.nbytes) == (0, 2 * BLOCK_BYTES)
    store.accept(*letter((0, 1), B))
    assert store.length(B) == 2
    assert torch.equal(store.landed(B, 2).cells_LCHTD, row(B, 2))


def test_memory_of_released_rows_beyond_the_limit_is_given_up() -> None:
    store = new_store(free_blocks=1)
    store.accept(*letter((0, 12), A))
    store.release(A)
    assert store.nbytes == BLOCK_BYTES


def test_rows_released_while_chunks_arrive_on_other_threads_leave_no_bytes_behind() -> None:
    store = new_store(max_blocks=200, free_blocks=0)
    rows = [RowId(index) for index in range(1, 31)]
    letters = [letter((position, position + 3), row_id) for row_id in rows for position in (0, 3, 6)]
    start = threading.Barrier(3)

    def give(part: int) -> None:
        start.wait(30)
        for one in letters[part::2]:
            store.accept(*one)

    threads = [threading.Thread(target=give, args=(part,)) for part in (0, 1)]
    for thread in threads:
        thread.start()
    start.wait(30)
    for row_id in rows:
        store.release(row_id)
    for thread in threads:
        thread.join(30)
    counters = store.counters
    assert counters.accepted + counters.stale == len(letters)
    assert (store.row_ids, store.nbytes) == ((), 0)


def test_a_new_epoch_takes_its_own_chunks_and_no_others_and_keeps_what_is_here() -> None:
    store = new_store()
    store.accept(*letter((0, 3)))
    store.release(B)
    store.renew(Epoch(4))
    store.accept(*letter((3, 4)))
    assert (store.length(A), store.counters.stale) == (3, 1)
    message, payload = letter((3, 5), epoch=Epoch(4))
    store.accept(msgspec.structs.replace(message, epoch=Epoch(4)), payload)
    assert torch.equal(store.landed(A, 5).cells_LCHTD, row(length=5))
    late, payload = letter((0, 1), B, epoch=Epoch(4))
    store.accept(msgspec.structs.replace(late, epoch=Epoch(4)), payload)
    assert (store.length(B), store.counters.stale) == (0, 2), "a row that has ended stays so"
