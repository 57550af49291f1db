"""A worker as a source of rows: it sends what it is asked for, from pools and copies, and says what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import msgspec
import pytest
import torch

from dejavu.clock import VirtualClock
from dejavu.control.holdings import HeldRow
from dejavu.control.plan import Plan
from dejavu.engine import messages as m
from dejavu.engine.build import new_kept
from dejavu.engine.host import Host
from dejavu.engine.kept import HeldPool
from dejavu.engine.mailbox import Mailbox
from dejavu.engine.payloads import decode_held
from dejavu.engine.pool_rows import PoolRows
from dejavu.engine.sources import Sources
from dejavu.ids import Epoch, RowId, WorkerName
from dejavu.kv.chunk import KvMessage, decode_message, seal
from dejavu.kv.inbox import KvInbox
from dejavu.kv.layout import LayerRange
from dejavu.kv.pool import KvPool
from dejavu.kv.route import Holding
from dejavu.transport.base import Hello, TransportError

from harness.plans import colocated_plan

A, B = RowId(1), RowId(2)
ALL, FIRST, SECOND, THIRD = LayerRange(0, 6), LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 6)
W2 = WorkerName("w2")
HEADS = (0, 2)


class Stand:
    """Worker ``w1`` of three in epoch 2: row A in its pool, row B in its former pool, A's first layers as a copy."""

    def __init__(self) -> None:
        self.plan: Plan = msgspec.structs.replace(colocated_plan(3), replication=1, epoch=Epoch(2))
        self.kept = new_kept(VirtualClock())
        self.kept.held = self._pool(SECOND, A, 5)
        self.kept.former = [self._pool(LayerRange(0, 3), B, 4)]
        place = self.plan.place_of(WorkerName("w1"))
        assert place is not None
        self.kept.replicas.enter("c", self.plan, place)
        self.told: list[tuple[str, m.AnyMessage, list[bytes]]] = []
        self.sent: list[tuple[str, KvMessage, bytes]] = []
        self.reached: list[str] = []
        self.is_cut_off = False
        self.hello = Hello(cluster="c", name="w1", incarnation="i", epoch=2)
        self.mailbox = Mailbox(cluster="c", epoch=lambda: Epoch(2), fingerprint=lambda: "")
        host = Host(
            name=WorkerName("w1"),
            plan=self.plan,
            place=place,
            kept=self.kept,
            mailbox=self.mailbox,
            peers=self,  # type: ignore[arg-type]
            clock=VirtualClock(),
            reach=self._reach,
            acknowledge=lambda *entry: None,
            is_asked_to_stop=lambda: False,
            is_superseded=lambda: False,
        )
        self.sources = Sources(host, self.kept, "c")

    def tell(self, peer: str, message: m.AnyMessage, payload: Sequence[memoryview] = ()) -> None:
        self.told.append((peer, message, [bytes(part) for part in payload]))

    def send(self, owner: str, header: bytes, payload: Sequence[memoryview]) -> Future[None]:
        self.sent.append((owner, decode_message(header), b"".join(payload)))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def landed(self, layers: LayerRange, row_id: RowId, length: int) -> torch.Tensor:
        """What was sent, once it is whole at a stage of those layers."""
        layout = self.plan.model.layout
        inbox = KvInbox(
            cluster="c", epoch=Epoch(2), layout=layout, holding=Holding(owner="w2", layers=layers, heads=HEADS)
        )
        inbox.expect(row_id, length)
        for _, message, payload in self.sent:
            inbox.accept(message, memoryview(payload))
        assert inbox.is_complete(row_id)
        return inbox.take(row_id).cells_LCHTD

    def copy(self, layers: LayerRange, row_id: RowId, length: int) -> torch.Tensor:
        """A copy of numbered cells has come. Returns them."""
        layout = self.plan.model.layout
        shape = (len(layers), 2, layout.num_kv_heads, length, layout.head_dim)
        cells = torch.arange(torch.Size(shape).numel()).view(shape).float()
        payload = memoryview(bytearray(cells.view(torch.uint8).reshape(-1).numpy().tobytes()))
        header = seal(
            epoch=Epoch(2),
            row_id=row_id,
            layers=layers,
            heads=HEADS,
            positions=(0, length),
            dtype="float32",
            payload=payload,
        )
        store = self.kept.replicas.store_for(layers)
        assert store is not None
        store.accept(KvMessage(cluster="c", epoch=Epoch(2), chunks=(header,)), payload)
        return cells

    @property
    def failed(self) -> list[m.AnyMessage]:
        return [message for _, message, _ in self.told if isinstance(message, m.RowsFailed)]

    def _reach(self, name: WorkerName) -> None:
        if self.is_cut_off:
            raise TransportError("refused", peer=name, phase="connect")
        self.reached.append(name)

    def _pool(self, layers: LayerRange, row_id: RowId, length: int) -> HeldPool:
        pool, rows = KvPool(self.plan.model.layout, layers, 4), PoolRows(2)
        cells = pool.cells_LCRHSD
        cells.copy_(torch.arange(1, 1 + cells.numel()).view(cells.shape))
        rows.begin([m.PromptRow(row_id, 1, 0, length, None)])
        rows.written(row_id, length)
        return HeldPool(pool=pool, rows=rows)


def part(row_id: RowId, layers: LayerRange, length: int, *, is_copy: bool = False, target: str = "w2") -> m.SendPart:
    return m.SendPart(row_id, layers, length, is_copy, WorkerName(target))


def test_a_worker_says_what_lies_in_its_pools_and_copies() -> None:
    stand = Stand()
    stand.copy(FIRST, A, 3)
    stand.sources.tell()
    ((peer, message, (payload,)),) = stand.told
    assert (peer, message) == ("controller", m.Holdings(epoch=Epoch(2)))
    assert decode_held(payload) == [
        HeldRow(A, SECOND, 5, False),
        HeldRow(B, LayerRange(0, 3), 4, False, in_place=False),
        HeldRow(A, FIRST, 3, True),
    ]


@pytest.mark.parametrize("layers", [SECOND, LayerRange(3, 4)])
def test_a_row_of_the_pool_is_sent_in_the_layers_and_up_to_the_length_that_were_asked_for(layers: LayerRange) -> None:
    stand = Stand()
    stand.sources.send([part(A, layers, 4)])
    assert stand.kept.held is not None
    assert torch.equal(stand.landed(layers, A, 4), stand.kept.held.pool.cells(2, layers, HEADS, (0, 4)))
    assert ({owner for owner, *_ in stand.sent}, stand.reached, stand.failed) == ({"w2"}, ["w2"], [])
    assert {message.step for _, message, _ in stand.sent} == {None}


def test_a_row_of_the_former_cut_is_found_too() -> None:
    stand = Stand()
    stand.sources.send([part(B, FIRST, 4)])
    assert torch.equal(stand.landed(FIRST, B, 4), stand.kept.former[0].pool.cells(2, FIRST, HEADS, (0, 4)))


@pytest.mark.parametrize("layers", [FIRST, LayerRange(1, 2)])
def test_a_copy_is_sent_in_the_layers_that_were_asked_for(layers: LayerRange) -> None:
    stand = Stand()
    cells = stand.copy(FIRST, A, 5)
    stand.sources.send([part(A, layers, 3, is_copy=True)])
    assert torch.equal(stand.landed(layers, A, 3), cells[layers.start : layers.stop, ..., :3, :])


def test_parts_for_several_targets_go_each_to_its_own() -> None:
    stand = Stand()
    stand.copy(FIRST, A, 5)
    stand.sources.send([part(A, SECOND, 4), part(A, FIRST, 3, is_copy=True, target="w0"), part(B, FIRST, 2)])
    assert sorted({(owner, chunk.row_id) for owner, message, _ in stand.sent for chunk in message.chunks}) == [
        ("w0", A),
        ("w2", A),
        ("w2", B),
    ]


@pytest.mark.parametrize(
    "missing",
    [
        part(A, SECOND, 6),
        part(A, ALL, 2),
        part(B, SECOND, 2),
        part(A, FIRST, 4, is_copy=True),
        part(B, FIRST, 1, is_copy=True),
    ],
    ids=["too long", "more layers", "other layers", "copy too short", "no copy"],
)
def test_what_is_not_here_after_all_is_told_and_the_other_rows_are_sent(missing: m.SendPart) -> None:
    stand = Stand()
    stand.copy(FIRST, A, 3)
    stand.sources.send([missing, part(A, SECOND, 5)])
    (failed,) = stand.failed
    assert isinstance(failed, m.RowsFailed)
    assert failed.row_ids == (missing.row_id,)
    assert [chunk.row_id for _, message, _ in stand.sent for chunk in message.chunks] == [A]


def test_rows_for_a_target_that_cannot_be_reached_fail_with_the_reason() -> None:
    stand = Stand()
    stand.is_cut_off = True
    stand.sources.send([part(A, SECOND, 5)])
    (failed,) = stand.failed
    assert isinstance(failed, m.RowsFailed)
    assert (failed.row_ids, stand.sent) == ((A,), [])
    assert "w2 cannot be reached" in failed.reason


def test_what_a_worker_sends_to_itself_lies_in_its_own_mailbox() -> None:
    stand = Stand()
    stand.sources.send([part(B, FIRST, 4, target="w1")])
    inbound = stand.mailbox.kv.get_nowait()
    assert inbound is not None
    assert (inbound.hello, stand.sent) == (stand.hello, [])
    stand.sent.append(("w1", decode_message(inbound.header), bytes(inbound.payload)))
    assert torch.equal(stand.landed(FIRST, B, 4), stand.kept.former[0].pool.cells(2, FIRST, HEADS, (0, 4)))
