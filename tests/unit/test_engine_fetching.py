"""KV that came corrupt is asked for again, and links that are lost, with a fake of the peers."""

from __future__ import annotations

import pytest

from dejavu.clock import VirtualClock
from dejavu.engine import messages as m
from dejavu.engine.fetching import MOST_FETCHES, FetchAgain
from dejavu.engine.lost import LostLinks
from dejavu.engine.mailbox import PeerLost
from dejavu.engine.messages import KvPart
from dejavu.errors import Fatal
from dejavu.ids import Epoch, RowId
from dejavu.kv.chunk import ChunkHeader
from dejavu.kv.layout import LayerRange

from harness.plans import split_plan

A, B = RowId(1), RowId(2)


def part(row_id: RowId, start: int, stop: int) -> KvPart:
    return KvPart(row_id, LayerRange(1, 2), (start, stop))


class FakePeers:
    """Notes what peers are told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, m.AnyMessage]] = []

    def tell(self, owner: str, message: m.AnyMessage) -> None:
        self.told.append((owner, message))


def chunk(row_id: RowId, start: int = 0) -> ChunkHeader:
    return ChunkHeader(
        epoch=Epoch(1),
        row_id=row_id,
        layers=LayerRange(1, 2),
        heads=(0, 2),
        positions=(start, start + 1),
        dtype="float32",
        num_bytes=0,
        checksum=0,
    )


def test_a_peer_is_asked_again_for_the_parts_that_came_corrupt() -> None:
    peers = FakePeers()
    fetching = FetchAgain(peers, Epoch(4))  # type: ignore[arg-type]
    assert fetching.ask("w0", [chunk(A, 2), chunk(B)]) == ()
    assert peers.told == [("w0", m.SendAgain(epoch=Epoch(4), parts=(part(A, 2, 3), part(B, 0, 1))))]
    assert fetching.num_asked == 2


def test_a_row_is_asked_for_a_bounded_number_of_times_and_others_are_not_affected() -> None:
    peers = FakePeers()
    fetching = FetchAgain(peers, Epoch(4))  # type: ignore[arg-type]
    for _ in range(MOST_FETCHES):
        assert fetching.ask("w0", [chunk(A)]) == ()
    assert fetching.ask("w0", [chunk(A, 1), chunk(B), chunk(A, 2)]) == (A,)
    assert len(peers.told) == MOST_FETCHES + 1
    assert peers.told[-1] == ("w0", m.SendAgain(epoch=Epoch(4), parts=(part(B, 0, 1),)))
    assert fetching.ask("w0", [chunk(A)]) == (A,)
    assert len(peers.told) == MOST_FETCHES + 1


def test_a_row_that_has_ended_is_forgotten() -> None:
    fetching = FetchAgain(FakePeers(), Epoch(4))  # type: ignore[arg-type]
    for _ in range(MOST_FETCHES):
        fetching.ask("w0", [chunk(A)])
    fetching.forget([A, B])
    assert fetching.ask("w0", [chunk(A)]) == ()


def test_a_row_whose_many_chunks_came_corrupt_together_is_asked_for_whole() -> None:
    fetching = FetchAgain(FakePeers(), Epoch(4))  # type: ignore[arg-type]
    assert fetching.ask("w0", [chunk(A, start) for start in range(MOST_FETCHES + 1)]) == ()


class FakeHost:
    """What a worker tells goes to ``told``."""

    def __init__(self) -> None:
        self.plan = split_plan()
        self.clock = VirtualClock()
        self.told: list[tuple[str, m.AnyMessage]] = []

    def tell(self, peer: str, message: m.AnyMessage) -> None:
        self.told.append((peer, message))


def lost(peer: str, reason: str) -> PeerLost:
    return PeerLost(peer=peer, reason=reason, epoch=Epoch(1))


def test_a_lost_controller_ends_the_worker_when_it_does_not_lead_into_another_epoch_in_time() -> None:
    host = FakeHost()
    links = LostLinks(host)  # type: ignore[arg-type]
    host.clock.advance(1000.0)
    links.check()
    links.note(lost("controller", "reset"))
    host.clock.advance(host.plan.timeout_s)
    links.note(lost("controller", "again"))
    links.check()
    host.clock.advance(1.0)
    with pytest.raises(Fatal, match="the controller is gone: reset"):
        links.check()
    assert host.told == []


def test_a_lost_peer_is_reported_once_and_each_peer_by_itself() -> None:
    host = FakeHost()
    links = LostLinks(host)  # type: ignore[arg-type]
    for event in (lost("w1", "reset"), lost("w1", "again"), lost("w2", "later")):
        links.note(event)
    assert host.told == [
        ("controller", m.LinkLost(epoch=Epoch(1), peer="w1", reason="reset")),
        ("controller", m.LinkLost(epoch=Epoch(1), peer="w2", reason="later")),
    ]
