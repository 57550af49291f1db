"""A copy of a row does not depend on how its cells were cut into chunks, in which order they came, or how often."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dejavu.ids import Epoch, RowId
from dejavu.kv.chunk import KvMessage, seal
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.replica import ReplicaLimits, ReplicaStore
from dejavu.kv.route import Holding

LAYOUT = KvLayout(model_hash="m", num_layers=5, num_kv_heads=3, head_dim=2, dtype="float32", max_length=12)
LAYERS, HEADS, ROW, EPOCH = LayerRange(1, 4), (0, 3), RowId(7), Epoch(3)

Box = tuple[tuple[int, int], ...]
"""Layers, kinds, heads, positions."""


def new_store(block_positions: int) -> ReplicaStore:
    return ReplicaStore(
        cluster="c",
        epoch=EPOCH,
        layout=LAYOUT,
        holding=Holding(owner="m", layers=LAYERS, heads=HEADS),
        limits=ReplicaLimits(max_bytes=1 << 20, block_positions=block_positions),
    )


def whole_row(length: int) -> torch.Tensor:
    shape = (len(LAYERS), 2, 3, length, LAYOUT.head_dim)
    return torch.arange(1, 1 + len(LAYERS) * 2 * 3 * length * 2, dtype=torch.float32).view(shape)


def give(store: ReplicaStore, cells: torch.Tensor, box: Box) -> None:
    """The box of the row has landed; its payload is overwritten at once."""
    layers, kinds, heads, positions = box
    within = slice(layers[0] - LAYERS.start, layers[1] - LAYERS.start)
    part = cells[within, slice(*kinds), slice(*heads), slice(*positions)].contiguous()
    payload = memoryview(bytearray(part.view(torch.uint8).reshape(-1).numpy().tobytes()))
    header = seal(
        epoch=EPOCH,
        row_id=ROW,
        layers=LayerRange(*layers),
        heads=heads,
        positions=positions,
        dtype="float32",
        payload=payload,
        kinds=kinds,
    )
    answer = store.accept(KvMessage(cluster="c", epoch=EPOCH, chunks=(header,)), payload)
    assert (answer.corrupt, answer.dropped) == ((), 0)
    payload[:] = b"\xff" * len(payload)


def cells_of(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(*span) for span in box)))


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, list[Box]]:
    """A row's length, and boxes that hold each of its cells once: the whole, cut in two again and again."""
    length = draw(st.integers(1, 9))
    boxes: list[Box] = [((LAYERS.start, LAYERS.stop), (0, 2), HEADS, (0, length))]
    for _ in range(draw(st.integers(0, 12))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axes = [axis for axis, (start, stop) in enumerate(box) if stop - start > 1]
        if not axes:
            boxes.append(box)
            continue
        axis = draw(st.sampled_from(axes))
        start, stop = box[axis]
        cut = draw(st.integers(start + 1, stop - 1))
        boxes += [(*box[:axis], span, *box[axis + 1 :]) for span in ((start, cut), (cut, stop))]
    return length, boxes


@settings(max_examples=60, deadline=None)
@given(case=partitions(), block_positions=st.integers(1, 5), data=st.data())
def test_any_partition_in_any_order_with_repeats_gives_the_same_row(
    case: tuple[int, list[Box]], block_positions: int, data: st.DataObject
) -> None:
    length, boxes = case
    repeats = data.draw(st.lists(st.sampled_from(boxes), max_size=4))
    cells, store = whole_row(length), new_store(block_positions)
    missing = set().union(*map(cells_of, boxes))
    num_new = 0
    for box in data.draw(st.permutations([*boxes, *repeats])):
        give(store, cells, box)
        num_new += bool(missing & cells_of(box))
        missing -= cells_of(box)
        here = min((position for *_, position in missing), default=length)
        assert store.length(ROW) == here
        if here:
            assert torch.equal(store.landed(ROW, here).cells_LCHTD, cells[..., :here, :])
    counters = store.counters
    assert torch.equal(store.landed(ROW, length).cells_LCHTD, cells)
    assert num_new == counters.accepted == len(boxes)
    assert counters.duplicate == len(repeats)


@settings(max_examples=60, deadline=None)
@given(case=partitions(), block_positions=st.integers(1, 5), data=st.data())
def test_a_missing_chunk_ends_the_row_at_its_first_position(
    case: tuple[int, list[Box]], block_positions: int, data: st.DataObject
) -> None:
    length, boxes = case
    lost = data.draw(st.sampled_from(boxes))
    cells, store = whole_row(length), new_store(block_positions)
    for box in data.draw(st.permutations(boxes)):
        if box is not lost:
            give(store, cells, box)
    here = lost[-1][0]
    assert store.length(ROW) == here
    if here:
        assert torch.equal(store.landed(ROW, here).cells_LCHTD, cells[..., :here, :])
    give(store, cells, lost)
    assert torch.equal(store.landed(ROW, length).cells_LCHTD, cells)
