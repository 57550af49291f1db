"""The inbox under a network that reorders, repeats, loses and corrupts chunks."""

from __future__ import annotations

import msgspec
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dejavu.ids import Epoch, RowId
from dejavu.kv.chunk import ChunkHeader, KvMessage, seal
from dejavu.kv.inbox import KvInbox
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.route import Holding

LAYOUT = KvLayout(model_hash="m", num_layers=5, num_kv_heads=3, head_dim=2, dtype="float32", max_length=16)
LAYERS = LayerRange(1, 4)
HEADS = (0, 3)
ROW = RowId(7)
EPOCH = Epoch(3)

Piece = tuple[ChunkHeader, bytearray]


def new_inbox() -> KvInbox:
    holding = Holding(owner="t", layers=LAYERS, heads=HEADS)
    return KvInbox(cluster="c", epoch=EPOCH, layout=LAYOUT, holding=holding)


def whole_row(length: int) -> torch.Tensor:
    shape = (len(LAYERS), 2, HEADS[1] - HEADS[0], length, LAYOUT.head_dim)
    return torch.arange(1, 1 + len(LAYERS) * 2 * 3 * length * 2, dtype=torch.float32).reshape(shape)


def piece(row: torch.Tensor, layers: tuple[int, int], heads: tuple[int, int], positions: tuple[int, int]) -> Piece:
    cells = row[layers[0] - LAYERS.start : layers[1] - LAYERS.start, :, slice(*heads), slice(*positions)].contiguous()
    payload = bytearray(cells.view(torch.uint8).reshape(-1).numpy().tobytes())
    header = seal(
        epoch=EPOCH,
        row_id=ROW,
        layers=LayerRange(*layers),
        heads=heads,
        positions=positions,
        dtype="float32",
        payload=memoryview(payload),
    )
    return header, payload


def give(inbox: KvInbox, chunk: Piece) -> bool:
    """True when the chunk made the row complete."""
    header, payload = chunk
    message = KvMessage(cluster="c", epoch=EPOCH, chunks=(header,))
    return ROW in inbox.accept(message, memoryview(payload)).completed


@st.composite
def rows_in_pieces(draw: st.DrawFn) -> tuple[int, list[Piece]]:
    """A row's length and chunks that cover it: pieces of a grid, and a few larger ones that overlap them."""
    length = draw(st.integers(1, 8))
    row = whole_row(length)
    step = draw(st.integers(1, 3))
    head_cut = draw(st.integers(1, 3))
    head_spans = [span for span in ((0, head_cut), (head_cut, 3)) if span[0] < span[1]]
    pieces = [
        piece(row, (layer, layer + 1), heads, (start, min(start + step, length)))
        for layer in LAYERS.indices
        for heads in head_spans
        for start in range(0, length, step)
    ]
    if draw(st.booleans()):
        pieces.append(piece(row, (1, 3), (0, 2), (0, length)))
    return length, pieces


@settings(max_examples=60)
@given(rows_in_pieces(), st.data())
def test_a_row_completes_exactly_when_its_last_cell_lands_under_reordering_and_repeats(
    case: tuple[int, list[Piece]], data: st.DataObject
) -> None:
    length, pieces = case
    repeats = data.draw(st.lists(st.sampled_from(pieces), max_size=5))
    order = data.draw(st.permutations([*pieces, *repeats]))
    expected_after = data.draw(st.integers(0, len(order)))
    inbox = new_inbox()
    missing = {
        (layer, head, position) for layer in LAYERS.indices for head in range(*HEADS) for position in range(length)
    }
    times_completed = 0
    for index, chunk in enumerate(order):
        if index == expected_after:
            times_completed += ROW in inbox.expect(ROW, length).completed
        times_completed += give(inbox, chunk)
        header = chunk[0]
        missing -= {
            (layer, head, position)
            for layer in header.layers.indices
            for head in range(*header.heads)
            for position in range(*header.positions)
        }
        assert times_completed == (not missing and index >= expected_after)
    if expected_after == len(order):
        times_completed += ROW in inbox.expect(ROW, length).completed
    assert times_completed == 1
    assert torch.equal(inbox.take(ROW).cells_LCHTD, whole_row(length))


@settings(max_examples=60)
@given(rows_in_pieces(), st.data())
def test_a_row_that_lost_a_needed_chunk_never_completes(case: tuple[int, list[Piece]], data: st.DataObject) -> None:
    length, pieces = case
    lost = data.draw(st.sampled_from([one for one in pieces if one[0].layers.start == 3]))
    inbox = new_inbox()
    inbox.expect(ROW, length)
    assert not any(give(inbox, chunk) for chunk in data.draw(st.permutations(pieces)) if chunk is not lost)
    assert "missing, first layer 3" in inbox.describe(ROW)


@settings(max_examples=100)
@given(rows_in_pieces(), st.data())
def test_a_corrupted_payload_never_lands_and_its_genuine_repeat_does(
    case: tuple[int, list[Piece]], data: st.DataObject
) -> None:
    length, pieces = case
    header, payload = data.draw(st.sampled_from(pieces))
    bad = bytearray(payload)
    bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    inbox = new_inbox()
    inbox.expect(ROW, length)
    answer = inbox.accept(KvMessage(cluster="c", epoch=EPOCH, chunks=(header,)), memoryview(bad))
    assert answer.corrupt == (ROW,)
    assert inbox.counters.bytes_landed == 0
    assert sum(give(inbox, chunk) for chunk in pieces) == 1
    assert torch.equal(inbox.take(ROW).cells_LCHTD, whole_row(length))


@settings(max_examples=100)
@given(rows_in_pieces(), st.data())
def test_a_header_that_was_altered_never_moves_its_bytes_elsewhere(
    case: tuple[int, list[Piece]], data: st.DataObject
) -> None:
    length, pieces = case
    header, payload = data.draw(st.sampled_from(pieces))
    altered = data.draw(
        st.sampled_from(
            [
                {"row_id": RowId(8)},
                {"epoch": Epoch(4)},
                {"layers": LayerRange(header.layers.start + 1, header.layers.stop + 1)},
                {"heads": (header.heads[0] + 1, header.heads[1] + 1)},
                {"positions": (header.positions[0] + 1, header.positions[1] + 1)},
                {"dtype": "bfloat16"},
                {"checksum": header.checksum ^ 1},
            ]
        )
    )
    inbox = new_inbox()
    inbox.expect(ROW, length)
    inbox.expect(RowId(8), length)
    message = KvMessage(cluster="c", epoch=EPOCH, chunks=(msgspec.structs.replace(header, **altered),))
    answer = inbox.accept(message, memoryview(payload))
    assert len(answer.corrupt) == 1
    assert inbox.counters.bytes_landed == 0
