"""One message to several destinations, and the mark of a step on the last of its messages."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch

from dejavu.ids import Epoch, RowId
from dejavu.kv.chunk import KvMessage, StepMark, decode_message, encode_message
from dejavu.kv.fan_out import FanOut
from dejavu.kv.staging import StagingRing
from dejavu.kv.stream import stream_out_rows
from dejavu.kv.stream_setup import PoolRow, StreamSetup

from harness.kv_receivers import Receivers
from harness.streamer_kit import LAYOUT, POSITION_BYTES, SOURCE, TARGETS, StreamerBench, numbered_pool, pool_row


class Holder:
    """A destination that is done with a message when the test says so."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.futures: list[Future[None]] = []
        self.payloads: list[bytes] = []
        self._refusal = refusal

    def put(self, header: bytes, payload: memoryview) -> Future[None]:
        if self._refusal is not None:
            raise self._refusal
        self.payloads.append(bytes(payload))
        self.futures.append(Future())
        return self.futures[-1]


def test_a_message_has_left_when_the_last_destination_is_done_with_its_memory() -> None:
    one, other = Holder(), Holder()
    sent = FanOut({"one": one, "other": other}).send("holders", b"h", (memoryview(b"ab"), memoryview(b"c")))
    other.futures[0].set_result(None)
    assert not sent.done()
    one.futures[0].set_result(None)
    assert sent.result(0) is None
    assert one.payloads == other.payloads == [b"abc"]


@pytest.mark.parametrize("is_last", [True, False])
def test_a_destination_that_fails_does_the_others_no_harm(is_last: bool) -> None:
    one, other = Holder(), Holder()
    sent = FanOut({"one": one, "other": other}).send("holders", b"h", (memoryview(b"a"),))
    ways = [lambda: other.futures[0].set_result(None), lambda: one.futures[0].set_exception(OSError("gone"))]
    for way in ways if is_last else reversed(ways):
        way()
    assert sent.result(0) is None


def test_a_message_fails_only_when_no_destination_took_it() -> None:
    one = Holder()
    sent = FanOut({"one": one, "other": Holder(ValueError("full"))}).send("holders", b"h", (memoryview(b"a"),))
    assert not sent.done()
    one.futures[0].set_exception(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        sent.result(0)


def test_a_destination_that_refuses_at_once_is_logged_once_and_the_other_is_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Holder()
    fan_out = FanOut({"one": one, "other": Holder(ValueError("full"))})
    for _ in range(3):
        sent = fan_out.send("holders", b"h", (memoryview(b"a"),))
        one.futures[-1].set_result(None)
        assert sent.result(0) is None
    assert [record.message for record in caplog.records] == ["copies do not reach other: full"]


def test_a_fan_out_to_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="to nobody"):
        FanOut({})


SETUP = StreamSetup(cluster="c", epoch=Epoch(1), source=SOURCE, targets=TARGETS, layout=LAYOUT)
MARK = StepMark(1, 9)


def marked(rows: Sequence[PoolRow], *, buffer_bytes: int) -> dict[str, list[KvMessage]]:
    """The messages of a marked job of the numbered pool, by owner, out of a ring of buffers of that size."""
    bench = StreamerBench()
    receivers: Receivers = bench.receivers
    staging = StagingRing(3, buffer_bytes)
    stream_out_rows(numbered_pool(), rows, SETUP, staging, receivers, mark=MARK)
    assert staging.num_out == 0
    messages: dict[str, list[KvMessage]] = {}
    for owner, message in receivers.letters:
        messages.setdefault(owner, []).append(message)
    bench.close()
    return messages


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("buffer_bytes", [POSITION_BYTES, 4096])
def test_the_mark_is_on_the_last_message_to_each_owner_and_on_no_other(length: int, buffer_bytes: int) -> None:
    """Whoever acknowledged an earlier one would vouch for cells that are still on their way."""
    rows = [pool_row(RowId(index + 1), index, length, 2) for index in range(4)]
    messages = marked(rows, buffer_bytes=buffer_bytes)
    assert set(messages) == {"t0", "t1"}
    for sent in messages.values():
        assert [message.step for message in sent] == [None] * (len(sent) - 1) + [MARK]
        assert (len(sent) > 1) == (buffer_bytes < 4096)


def test_a_job_whose_messages_cannot_be_handed_over_gives_every_buffer_back() -> None:
    bench = StreamerBench()
    bench.receivers.refuse = OSError("no way")
    staging = StagingRing(3, POSITION_BYTES)
    rows = [pool_row(RowId(index + 1), index, 1, 2) for index in range(4)]
    with pytest.raises(OSError, match="no way"):
        stream_out_rows(bench.pool, rows, SETUP, staging, bench.receivers, mark=MARK)
    assert staging.num_out == 0
    bench.receivers.refuse = None
    bench.close()


def test_a_streamers_step_carries_its_mark_and_a_prompt_none() -> None:
    bench = StreamerBench()
    bench.streamer.submit_rows(bench.pool, [pool_row(RowId(1), 0, 3)], made_by="prompt")
    bench.streamer.submit_rows(bench.pool, [pool_row(RowId(1), 0, 1, 3)], made_by="step", mark=MARK)
    bench.streamer.drain(30)
    marks = {chunk.positions: message.step for _, message in bench.receivers.letters for chunk in message.chunks}
    assert marks == {(0, 3): None, (3, 4): MARK}
    assert torch.equal(bench.received(RowId(1), 4), bench.sent(0, 4))
    bench.close()


def test_a_marked_message_survives_its_journey() -> None:
    bench = StreamerBench()
    bench.streamer.submit_rows(bench.pool, [pool_row(RowId(1), 0, 1)], made_by="step", mark=MARK)
    bench.streamer.drain(30)
    (_, message), _ = bench.receivers.letters
    assert decode_message(encode_message(message)) == message
    bench.close()
