"""A worker as a source of rows for others: it says what it holds, and sends what is asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import groupby

from dejavu.control.holdings import HeldRow
from dejavu.engine import messages as m
from dejavu.engine.host import Host
from dejavu.engine.kept import HeldPool, Kept
from dejavu.engine.payloads import encode_held
from dejavu.engine.peers import CONTROLLER
from dejavu.errors import InvalidTransition, Retryable
from dejavu.ids import RowId, WorkerName
from dejavu.kv.layout import LayerRange
from dejavu.kv.route import Holding, RowSpan
from dejavu.kv.scatter import Region
from dejavu.kv.staging import StagingRing
from dejavu.kv.stream import Streamed, stream_out_rows, stream_regions
from dejavu.kv.stream_setup import PoolRow, StreamSetup
from dejavu.transport.base import Buffer, Inbound

logger = logging.getLogger(__name__)

_STAGING_BUFFERS = 4
_BUFFER_BYTES = 8 * 2**20


class Sources:
    """Main thread only. What is sent leaves before the call returns, but for the last few buffers."""

    def __init__(self, host: Host, kept: Kept, cluster: str) -> None:
        self._host = host
        self._kept = kept
        self._cluster = cluster

    def tell(self) -> None:
        """The controller knows which cells are here."""
        held: list[HeldRow] = [
            row for one in self._kept.pools for row in one.rows.held(one.pool.layers, in_place=one is self._kept.held)
        ]
        held.extend(self._kept.replicas.held())
        payload = (memoryview(encode_held(held)),)
        self._host.tell(CONTROLLER, m.Holdings(epoch=self._host.plan.epoch), payload)

    def send(self, parts: Sequence[m.SendPart]) -> None:
        """The parts are on their way; the controller is told of rows whose cells are not here after all."""
        staging: StagingRing | None = None
        for (target, layers, is_copy), group in groupby(sorted(parts, key=_key), key=_key):
            staging = staging or self._staging(layers)
            rows = list(group)
            with self._host.recorder.span("restore", "recover", rows=len(rows)) as args:
                streamed = self._send(target, layers, rows, is_copy=is_copy, staging=staging)
                args["bytes"] = sum(one.num_bytes for one in streamed)
            for one in streamed:
                self._watch(one, target)

    def _send(
        self,
        target: WorkerName,
        layers: LayerRange,
        parts: Sequence[m.SendPart],
        *,
        is_copy: bool,
        staging: StagingRing,
    ) -> list[Streamed]:
        setup = self._setup(target, layers)
        sent, failed = [], []
        try:
            self._host.reach(target)
        except Retryable as error:
            self._failed([part.row_id for part in parts], f"{target} cannot be reached: {error}")
            return []
        for part in parts:
            try:
                sent.append(self._send_row(part, setup, staging, is_copy=is_copy))
            except (InvalidTransition, Retryable) as error:
                logger.warning("row %s cannot be restored from here: %s", part.row_id, error)
                failed.append(part.row_id)
        self._failed(failed, "its cells were not where they were said to be")
        return sent

    def _send_row(self, part: m.SendPart, setup: StreamSetup, staging: StagingRing, *, is_copy: bool) -> Streamed:
        timeout_s = self._host.plan.timeout_s
        if is_copy:
            landed = self._kept.replicas.landed(part.row_id, part.layers, part.length)
            first = part.layers.start - landed.layers.start
            region = Region(
                row_id=part.row_id,
                layers=part.layers,
                heads=landed.heads,
                positions=(0, part.length),
                parts=(landed.cells_LCHTD[first : first + len(part.layers)],),
            )
            return stream_regions({part.target: [region]}, setup, staging, self._sender, timeout_s=timeout_s)
        held = self._holding(part)
        place = held.rows.place_of(part.row_id)
        assert place is not None
        row = PoolRow(span=RowSpan(row_id=part.row_id, length=part.length), row_index=place)
        return stream_out_rows(held.pool, (row,), setup, staging, self._sender, layers=part.layers, timeout_s=timeout_s)

    def _holding(self, part: m.SendPart) -> HeldPool:
        for held in self._kept.pools:
            layers = held.pool.layers
            inside = layers.start <= part.layers.start and part.layers.stop <= layers.stop
            if inside and held.rows.length_of(part.row_id) >= part.length:
                return held
        raise InvalidTransition(f"row {part.row_id} has no {part.length} positions of {part.layers} in a pool here")

    def _setup(self, target: WorkerName, layers: LayerRange) -> StreamSetup:
        heads = (0, self._host.plan.model.num_kv_heads)
        return StreamSetup(
            cluster=self._cluster,
            epoch=self._host.plan.epoch,
            source=Holding(owner=self._host.name, layers=layers, heads=heads),
            targets=(Holding(owner=target, layers=layers, heads=heads),),
            layout=self._host.plan.model.layout,
        )

    @property
    def _sender(self) -> _Ways:
        return _Ways(self._host)

    def _staging(self, layers: LayerRange) -> StagingRing:
        layout = self._host.plan.model.layout
        least_bytes = layout.position_bytes * self._host.plan.model.num_layers
        device = self._host.plan.rows_device
        return StagingRing(_STAGING_BUFFERS, max(_BUFFER_BYTES, least_bytes), pin=device != "cpu", device=device)

    def _watch(self, streamed: Streamed, target: WorkerName) -> None:
        def done(sent: Future[None]) -> None:
            if not sent.cancelled() and sent.exception() is not None:
                logger.warning("a row did not reach %s: %s", target, sent.exception())

        for sent in streamed.sends:
            sent.add_done_callback(done)

    def _failed(self, row_ids: Iterable[RowId], reason: str) -> None:
        failed = tuple(row_ids)
        if failed:
            message = m.RowsFailed(epoch=self._host.plan.epoch, row_ids=failed, reason=reason)
            self._host.tell(CONTROLLER, message)


class _Ways:
    """The ``Sender`` to peers, and to this very worker where a pool was cut anew."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def send(self, owner: str, header: bytes, payload: Sequence[Buffer]) -> Future[None]:
        """The message is queued, or lies in this worker's own mailbox."""
        if owner != self._host.name:
            return self._host.peers.send(owner, header, payload)
        # The bytes are read by another thread after the staging buffer has been given back.
        own = memoryview(b"".join(payload))
        hello = self._host.peers.hello
        self._host.mailbox.kv.put(Inbound(hello=hello, header=header, payload=own, release=lambda: None))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _key(part: m.SendPart) -> tuple[WorkerName, LayerRange, bool]:
    return (part.target, part.layers, part.is_copy)
