"""What arrives at a process and how it is sorted: mailbox, peers, landing thread, messages."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec
import pytest

from dejavu.control.ring import StepRow
from dejavu.engine import messages as m
from dejavu.engine.landing import Landing
from dejavu.engine.mailbox import ChunksSpoilt, Mailbox, PeerLost, Received, RowsLanded, Wake
from dejavu.engine.payloads import decode_spans, encode_spans
from dejavu.engine.peers import Peers
from dejavu.engine.replicas import Replicas
from dejavu.ids import Epoch, RowId
from dejavu.kv.accepted import Accepted
from dejavu.kv.chunk import KvMessage, encode_message, seal
from dejavu.kv.layout import LayerRange
from dejavu.report.spans import Span
from dejavu.request import Sampling
from dejavu.transport.base import Hello, Inbound, TransportError

EPOCH = Epoch(3)
ENDED = m.RowsEnded(epoch=EPOCH, row_ids=(RowId(1),))


def hello(**values: object) -> Hello:
    defaults = {"cluster": "c", "name": "w1", "incarnation": "i", "epoch": 3, "fingerprint": ""}
    return Hello(**{**defaults, **values})  # type: ignore[arg-type]


class Delivery:
    """An inbound message that knows whether it was released."""

    def __init__(self, header: bytes, payload: bytes = b"") -> None:
        self.is_released = False
        self.inbound = Inbound(hello=hello(), header=header, payload=memoryview(payload), release=self._release)

    def _release(self) -> None:
        self.is_released = True


def mailbox(epoch: Epoch | None = EPOCH, fingerprint: str = "here") -> Mailbox:
    return Mailbox(cluster="c", epoch=lambda: epoch, fingerprint=lambda: fingerprint)


@pytest.mark.parametrize(
    ("box", "peer", "words"),
    [
        (mailbox(), hello(cluster="d"), "'c', not 'd'"),
        (mailbox(None), hello(), "no plan"),
        (mailbox(), hello(epoch=2), "epoch 2 .* 3 is"),
        (mailbox(), hello(fingerprint="there"), "here here; w1 has there"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_with_both_values(box: Mailbox, peer: Hello, words: str) -> None:
    assert re.search(words, str(box.admit(peer)))


@pytest.mark.parametrize("fingerprint", ["", "here"])
def test_a_peer_that_fits_is_admitted(fingerprint: str) -> None:
    assert mailbox().admit(hello(fingerprint=fingerprint)) is None


def test_a_control_message_is_decoded_for_the_main_thread() -> None:
    box, delivery = mailbox(), Delivery(m.encode(ENDED))
    box.received(delivery.inbound)
    event = box.take(0.0)
    assert isinstance(event, Received)
    assert event.message == ENDED
    assert not delivery.is_released
    assert box.take(0.0) is None


def test_a_message_of_another_epoch_is_dropped_counted_and_released() -> None:
    box, delivery = mailbox(Epoch(4)), Delivery(m.encode(ENDED))
    box.received(delivery.inbound)
    assert box.take(0.0) is None
    assert (box.num_stale, delivery.is_released) == (1, True)


def test_an_unreadable_message_is_dropped_and_released() -> None:
    box, delivery = mailbox(), Delivery(m.CONTROL + b"\xc1")
    box.received(delivery.inbound)
    assert box.take(0.0) is None
    assert delivery.is_released


def test_kv_goes_to_the_landing_thread() -> None:
    box = mailbox()
    delivery = Delivery(encode_message(KvMessage(cluster="c", epoch=EPOCH, chunks=())))
    box.received(delivery.inbound)
    assert box.take(0.0) is None
    assert box.kv.get_nowait() is delivery.inbound


def test_a_lost_link_and_a_wake_up_reach_the_main_thread_in_order() -> None:
    box = mailbox()
    box.lost(hello(), "reset")
    box.post(Wake())
    assert box.take(0.0) == PeerLost(peer="w1", reason="reset", epoch=EPOCH)
    assert box.take(1.0) == Wake()


@pytest.mark.parametrize(
    "message",
    [
        ENDED,
        m.RunPrompt(epoch=EPOCH, rows=(m.PromptRow(RowId(1), 0, 1, 5, Sampling(temperature=0.5, seed=2)),)),
        m.StepActivations(epoch=EPOCH, microbatch=1, step=4, rows=(StepRow(RowId(1), 0, 5, 9, None),)),
        m.RowsFailed(epoch=EPOCH, row_ids=(RowId(1),), reason="why", while_prompt=True),
        m.Stop(epoch=EPOCH, reason="abort"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_survives_its_journey(message: m.AnyMessage) -> None:
    header = m.encode(message)
    assert header[:1] == m.CONTROL
    assert m.decode(header) == message


def test_a_header_that_is_no_message_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        m.decode(m.CONTROL + msgspec.msgpack.encode({"type": "Unknown"}))


def test_spans_survive_their_journey() -> None:
    spans = [Span("step", "compute", 1.0, 0.5, {"rows": 2})]
    assert decode_spans(encode_spans(spans)) == spans


class FakeLink:
    description = "fake"

    def __init__(self, sent: Future[None], error: TransportError | None = None) -> None:
        self._sent = sent
        self._error = error
        self.is_closed = False

    def send(self, header: bytes, payload: Sequence[memoryview] = (), *, timeout_s: float = 1.0) -> Future[None]:
        return self._sent

    def close(self, timeout_s: float) -> None:
        self.is_closed = True
        if self._error is not None:
            raise self._error


class FakeTransport:
    def __init__(self, link: FakeLink) -> None:
        self._link = link

    def connect(self, address: str, hello: Hello, *, peer: str, timeout_s: float) -> FakeLink:
        return self._link


def peers(link: FakeLink, failures: list[tuple[str, str, Epoch]]) -> Peers:
    made = Peers(
        FakeTransport(link),  # type: ignore[arg-type]
        hello(),
        timeout_s=1.0,
        on_failed=lambda *failure: failures.append(failure),
    )
    made.connect("w2", "127.0.0.1:1", timeout_s=1.0)
    return made


def test_a_told_message_that_fails_is_reported_with_its_peer() -> None:
    failures: list[tuple[str, str, Epoch]] = []
    sent: Future[None] = Future()
    peers(FakeLink(sent), failures).tell("w2", ENDED)
    assert failures == []
    sent.set_exception(TransportError("reset", peer="w2", phase="send"))
    assert [(peer, epoch) for peer, _, epoch in failures] == [("w2", EPOCH)]


def test_a_message_to_a_peer_without_a_link_fails_and_is_reported() -> None:
    failures: list[tuple[str, str, Epoch]] = []
    made = peers(FakeLink(Future()), failures)
    assert made.names == ("w2",)
    assert isinstance(made.send("w9", b"").exception(), TransportError)
    made.tell("w9", ENDED)
    assert [(peer, epoch) for peer, _, epoch in failures] == [("w9", EPOCH)]


def test_closing_links_goes_on_past_a_peer_that_is_gone() -> None:
    link = FakeLink(Future(), TransportError("gone", peer="w2", phase="close"))
    made = peers(link, [])
    made.close(1.0)
    assert link.is_closed
    assert made.names == ()


class FakeInbox:
    """Says of every message what the test wants."""

    def __init__(self, accepted: Accepted) -> None:
        self._accepted = accepted

    def accept(self, message: KvMessage, payload: memoryview) -> Accepted:
        return self._accepted


def land(accepted: Accepted | None, *headers: bytes) -> tuple[Mailbox, list[Delivery]]:
    box = mailbox()
    landing = Landing(box, None if accepted is None else FakeInbox(accepted), Replicas())  # type: ignore[arg-type]
    deliveries = [Delivery(header) for header in headers]
    for delivery in deliveries:
        box.kv.put(delivery.inbound)
    landing.close()
    return box, deliveries


KV = encode_message(KvMessage(cluster="c", epoch=EPOCH, chunks=()))


def test_landed_rows_are_announced_and_the_message_released() -> None:
    box, deliveries = land(Accepted(completed=(RowId(1),)), KV)
    assert box.take(0.0) == RowsLanded(row_ids=(RowId(1),))
    assert deliveries[0].is_released


def test_corrupt_chunks_are_announced_with_their_sender() -> None:
    payload = memoryview(b"1234")
    ranges = {"layers": LayerRange(0, 1), "heads": (0, 1), "positions": (0, 1)}
    chunk = seal(epoch=EPOCH, row_id=RowId(1), dtype="float32", payload=payload, **ranges)  # type: ignore[arg-type]
    box, _ = land(Accepted(corrupt=(RowId(1),), corrupt_chunks=(chunk,)), KV)
    assert box.take(0.0) == ChunksSpoilt(peer="w1", chunks=(chunk,))


def test_an_unreadable_kv_message_does_not_end_the_landing_thread(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        box, deliveries = land(Accepted(completed=(RowId(1),)), b"\x00nonsense", KV)
    assert box.take(0.0) == RowsLanded(row_ids=(RowId(1),))
    assert all(delivery.is_released for delivery in deliveries)
    assert "dropped" in caplog.text


def test_kv_at_a_stage_that_takes_none_is_dropped_and_released() -> None:
    box, deliveries = land(None, KV)
    assert box.take(0.0) is None
    assert deliveries[0].is_released
