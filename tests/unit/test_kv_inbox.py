"""The inbox's rows: early, stale, foreign, ended; one behaviour each."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch

from dejavu.errors import InvalidTransition
from dejavu.ids import Epoch, RowId
from dejavu.kv.chunk import ChunkHeader, KvMessage, seal
from dejavu.kv.inbox import InboxLimits, KvInbox
from dejavu.kv.layout import KvLayout, LayerRange
from dejavu.kv.route import Holding

LAYOUT = KvLayout(model_hash="m", num_layers=4, num_kv_heads=2, head_dim=3, dtype="float32", max_length=8)
ROW_BYTES = 2 * 2 * 2 * 3 * 4  # per position: 2 layers, K and V, 2 heads, 3 dims


def new_inbox(limits: InboxLimits | None = None) -> KvInbox:
    holding = Holding(owner="t1", layers=LayerRange(2, 4), heads=(0, 2))
    return KvInbox(cluster="c", epoch=Epoch(3), layout=LAYOUT, holding=holding, limits=limits)


def chunk(row_id: int, start: int, stop: int, **fields: object) -> tuple[KvMessage, memoryview]:
    """A message of one chunk of both layers and heads; ``fields`` differ from what the inbox wants."""
    payload = memoryview(bytearray(range(256)) * 4)[: (stop - start) * ROW_BYTES]
    ranges: dict[str, object] = {"epoch": Epoch(3), "layers": LayerRange(2, 4), "heads": (0, 2), "dtype": "float32"}
    header = seal(row_id=RowId(row_id), positions=(start, stop), payload=payload, **{**ranges, **fields})  # type: ignore[arg-type]
    return KvMessage(cluster="c", epoch=Epoch(3), chunks=(header,)), payload


def test_a_row_that_is_whole_but_not_expected_is_not_complete_until_it_is() -> None:
    inbox = new_inbox()
    assert inbox.accept(*chunk(1, 0, 4)).completed == ()
    with pytest.raises(InvalidTransition, match="row 1 cannot be taken: it is not expected"):
        inbox.take(RowId(1))
    assert inbox.expect(RowId(1), 4).completed == (RowId(1),)
    assert inbox.take(RowId(1)).length == 4


def test_a_row_of_one_position_less_than_promised_is_not_complete() -> None:
    inbox = new_inbox()
    inbox.expect(RowId(1), 5)
    assert inbox.accept(*chunk(1, 0, 4)).completed == ()
    with pytest.raises(InvalidTransition, match="first layer 2 K head 0 position 4"):
        inbox.take(RowId(1))


def test_a_chunk_beyond_the_promised_length_is_reported_early_or_not() -> None:
    inbox = new_inbox()
    inbox.expect(RowId(1), 3)
    assert inbox.accept(*chunk(1, 0, 4)).corrupt == (RowId(1),)
    inbox.accept(*chunk(2, 0, 4))
    assert inbox.expect(RowId(2), 3).corrupt == (RowId(2),)


def test_late_chunks_of_a_released_row_are_dropped_and_counted() -> None:
    inbox = new_inbox()
    inbox.expect(RowId(1), 4)
    inbox.accept(*chunk(1, 0, 2))
    inbox.release(RowId(1))
    answer = inbox.accept(*chunk(1, 2, 4))
    assert (answer.completed, answer.dropped) == ((), 1)
    assert inbox.counters.stale == 1
    assert inbox.num_rows == 0
    with pytest.raises(InvalidTransition, match="a new attempt needs a new row id"):
        inbox.expect(RowId(1), 4)


def test_a_release_before_anything_is_known_of_the_row_still_drops_its_chunks() -> None:
    inbox = new_inbox()
    inbox.release(RowId(9))
    inbox.release(RowId(9))
    assert inbox.accept(*chunk(9, 0, 1)).dropped == 1


def test_chunks_of_a_taken_row_are_dropped() -> None:
    inbox = new_inbox()
    inbox.expect(RowId(1), 1)
    inbox.accept(*chunk(1, 0, 1))
    inbox.take(RowId(1))
    assert inbox.accept(*chunk(1, 0, 1)).dropped == 1
    with pytest.raises(InvalidTransition, match="it has ended"):
        inbox.take(RowId(1))


def test_tombstones_are_bounded_and_older_rows_stay_ended() -> None:
    inbox = new_inbox(InboxLimits(num_tombstones=2))
    for row_id in range(5):
        inbox.release(RowId(row_id))
    for row_id in range(5):
        assert inbox.accept(*chunk(row_id, 0, 1)).dropped == 1
    assert inbox.accept(*chunk(5, 0, 1)).dropped == 0


def test_the_same_row_may_be_expected_again_but_not_with_another_length() -> None:
    inbox = new_inbox()
    inbox.expect(RowId(1), 2)
    inbox.accept(*chunk(1, 0, 1))
    inbox.expect(RowId(1), 2)
    assert inbox.accept(*chunk(1, 1, 2)).completed == (RowId(1),)
    with pytest.raises(InvalidTransition, match="expected with length 2, now with 3"):
        inbox.expect(RowId(1), 3)
    with pytest.raises(ValueError, match=r"length 9 is not within 1\.\.8"):
        inbox.expect(RowId(2), 9)


def test_another_epoch_or_cluster_is_stale() -> None:
    inbox = new_inbox()
    inbox.expect(RowId(1), 1)
    assert inbox.accept(*chunk(1, 0, 1, epoch=Epoch(2))).dropped == 1
    message, payload = chunk(1, 0, 1)
    assert inbox.accept(msgspec.structs.replace(message, cluster="other"), payload).dropped == 1
    assert inbox.counters.stale == 2
    assert inbox.counters.bytes_landed == 0


@pytest.mark.parametrize(
    "fields",
    [{"layers": LayerRange(1, 3)}, {"heads": (1, 3)}, {"dtype": "bfloat16"}, {"layers": LayerRange(2, 3)}],
    ids=["foreign layers", "foreign heads", "another dtype", "bytes of another shape"],
)
def test_a_genuine_chunk_that_does_not_belong_here_is_reported(fields: dict[str, object]) -> None:
    inbox = new_inbox()
    inbox.expect(RowId(1), 1)
    assert inbox.accept(*chunk(1, 0, 1, **fields)).corrupt == (RowId(1),)
    assert inbox.counters.bytes_landed == 0


def test_a_message_whose_payload_was_cut_reports_all_its_rows() -> None:
    inbox = new_inbox()
    one, payload = chunk(1, 0, 1)
    two, _ = chunk(2, 0, 1)
    message = msgspec.structs.replace(one, chunks=one.chunks + two.chunks)
    assert inbox.accept(message, payload).corrupt == (RowId(1), RowId(2))


def test_a_corrupt_chunk_leaves_the_others_of_its_message_unharmed() -> None:
    inbox = new_inbox()
    parts = [chunk(row_id, 0, 1) for row_id in (1, 2, 3)]
    headers: tuple[ChunkHeader, ...] = tuple(message.chunks[0] for message, _ in parts)
    payload = bytearray(b"".join(part for _, part in parts))
    payload[ROW_BYTES + 5] ^= 1
    for row_id in (1, 2, 3):
        inbox.expect(RowId(row_id), 1)
    answer = inbox.accept(KvMessage(cluster="c", epoch=Epoch(3), chunks=headers), memoryview(payload))
    assert answer.completed == (RowId(1), RowId(3))
    assert answer.corrupt == (RowId(2),)


def test_the_transports_payload_may_be_reused_after_accept() -> None:
    inbox = new_inbox()
    for expected_first in (True, False):
        row_id = RowId(int(expected_first))
        message, payload = chunk(row_id, 0, 1)
        own = memoryview(bytearray(payload))
        if expected_first:
            inbox.expect(row_id, 1)
        inbox.accept(message, own)
        own[:] = bytes(len(own))
        inbox.expect(row_id, 1)
        landed = inbox.take(row_id).cells_LCHTD
        assert landed.contiguous().view(torch.uint8).reshape(-1).numpy().tobytes() == payload.tobytes()


def test_early_chunks_are_bounded_and_the_longest_waiting_row_goes_first() -> None:
    inbox = new_inbox(InboxLimits(early_bytes=3 * ROW_BYTES))
    inbox.accept(*chunk(1, 0, 1))
    inbox.accept(*chunk(1, 1, 2))
    inbox.accept(*chunk(2, 0, 1))
    assert inbox.accept(*chunk(3, 0, 1)).dropped == 2
    assert inbox.nbytes == 2 * ROW_BYTES
    assert inbox.accept(*chunk(4, 0, 4)).dropped == 1
    assert inbox.counters.early_dropped == 3
    assert inbox.expect(RowId(1), 1).completed == ()
    assert inbox.expect(RowId(2), 1).completed == (RowId(2),)


def test_memory_of_ended_rows_is_used_again_and_shows_no_old_bytes_as_landed() -> None:
    inbox = new_inbox()
    inbox.prepare(1, 4)
    assert inbox.nbytes == 4 * ROW_BYTES
    for row_id in (1, 2):
        inbox.expect(RowId(row_id), 4)
        inbox.accept(*chunk(row_id, 0, 4))
        inbox.recycle(inbox.take(RowId(row_id)))
    inbox.expect(RowId(3), 2)
    assert inbox.nbytes == 4 * ROW_BYTES
    assert "32 cells missing" not in inbox.describe(RowId(3))
    assert "16 cells missing" in inbox.describe(RowId(3))


def test_unused_memory_beyond_the_limit_is_given_up() -> None:
    inbox = new_inbox(InboxLimits(free_landing_bytes=4 * ROW_BYTES))
    for row_id in (1, 2):
        inbox.expect(RowId(row_id), 4)
    for row_id in (1, 2):
        inbox.release(RowId(row_id))
    assert inbox.nbytes == 4 * ROW_BYTES


def test_rows_released_while_chunks_arrive_from_other_threads_leave_nothing_behind() -> None:
    inbox = new_inbox(InboxLimits(free_landing_bytes=0))
    rows = [RowId(row_id) for row_id in range(40)]
    messages = [chunk(row_id, position, position + 1) for row_id in rows for position in range(4)]
    for row_id in rows:
        inbox.expect(row_id, 4)
    start = threading.Barrier(3)

    def give(part: int) -> None:
        start.wait()
        for message, payload in messages[part::2]:
            inbox.accept(message, payload)

    threads = [threading.Thread(target=give, args=(part,)) for part in (0, 1)]
    for thread in threads:
        thread.start()
    start.wait()
    for row_id in rows:
        inbox.release(row_id)
    for thread in threads:
        thread.join(30)
    counters = inbox.counters
    assert counters.accepted + counters.stale == len(messages)
    assert (inbox.num_rows, inbox.nbytes) == (0, 0)
